"""Configuration files, shipped in the wheel as `torchrec_kstep._conf`."""
