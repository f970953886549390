"""Starting ranks on hosts: torchrun with deadlines and with causes. `python -m torchrec_kstep.launch`."""
