"""`python -m torchrec_kstep.launch`: takes torchrun's options, and ends in one line that says why where torchrun would wait.

    python -m torchrec_kstep.launch --nnodes 2 --node-rank 0 --nproc-per-node 1 --rdzv-endpoint 10.0.0.1:29500 \
        -m torchrec_kstep.train optim.lr=1e-3

Before torchrun starts, the hosts call the roll through the rendezvous store: an address that nobody answers, a port that
something else holds, or a host that never starts is named within `join_timeout` seconds (20, or `--rdzv-conf join_timeout=N`).
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import get_args_parser, parse_min_max_nnodes
from torch.distributed.run import run as torchrun

from torchrec_kstep.errors import ConfigError, LaunchError
from torchrec_kstep.launch.network import interface_of, is_resolvable
from torchrec_kstep.launch.roll_call import Meeting, call_roll

JOIN_TIMEOUT_S = 20
DEFAULT_PORT = 29500
EXIT_FAILURE = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Starts this host's ranks, waits for them, and returns the exit code for the shell."""
    parser = get_args_parser()
    parser.prog = "python -m torchrec_kstep.launch"
    parser.set_defaults(node_rank=None)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        meeting = meet_hosts(args)  # kept until the end: it holds the store
    except ConfigError as error:
        return _end(str(error), EXIT_USAGE)
    except LaunchError as error:
        return _end(str(error), EXIT_FAILURE)
    _share_cores(args.nproc_per_node)
    if args.log_dir:
        print(f"logs of the ranks: {os.path.abspath(args.log_dir)}", file=sys.stderr, flush=True)
    try:
        torchrun(args)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else f"signal {-failure.exitcode}"
        return _end(f"rank {rank} on host {socket.gethostname()} ended with {ended}; its own words are above", max(failure.exitcode, 1))
    except RendezvousError as error:
        return _end(
            f"the hosts met, but torchrun's rendezvous failed: {' '.join(str(error).split()) or type(error).__name__}", EXIT_FAILURE
        )
    except SignalException as stopped:
        return _end(f"stopped by {stopped.sigval.name}", 128 + stopped.sigval)
    finally:
        del meeting
    return 0


def meet_hosts(args: argparse.Namespace) -> Meeting | None:
    """Calls the roll of the hosts and completes torchrun's arguments with what it found. One host needs neither.

    Raises:
        ConfigError: the arguments cannot be meant.
        LaunchError: the hosts do not find one another.
    """
    try:
        min_hosts, max_hosts = parse_min_max_nnodes(args.nnodes)
    except (RuntimeError, ValueError):
        raise ConfigError(f"--nnodes {args.nnodes}: expected a number of hosts or MIN:MAX") from None
    node_rank, args.node_rank = args.node_rank, 0  # torchrun uses it with a static rendezvous only, and warns
    if max_hosts == 1 or args.standalone:
        return None
    host, port = _endpoint(args)
    conf = dict(item.split("=", 1) for item in args.rdzv_conf.split(",") if "=" in item)
    deadline_s = int(conf.setdefault("join_timeout", str(JOIN_TIMEOUT_S)))
    meeting = call_roll(host, port, job=args.rdzv_id, num_hosts=min_hosts, deadline_s=deadline_s, host_rank=node_rank)
    conf.setdefault("read_timeout", str(deadline_s))
    conf["is_host"] = str(int(meeting.holds_store))
    args.rdzv_backend = "c10d"
    args.rdzv_endpoint = f"{host}:{port}"
    args.rdzv_conf = ",".join(f"{key}={value}" for key, value in conf.items())
    _name_this_host(args, meeting)
    return meeting


def _endpoint(args: argparse.Namespace) -> tuple[str, int]:
    """Returns host and port where the hosts meet, from --rdzv-endpoint or --master-addr and --master-port."""
    if not args.rdzv_endpoint:
        if args.master_addr in ("", "127.0.0.1") and args.master_port is None:
            raise ConfigError("several hosts need the address of one of them: --rdzv-endpoint HOST:PORT, the same on all hosts")
        return args.master_addr, args.master_port or DEFAULT_PORT
    host, _, port = args.rdzv_endpoint.rpartition(":") if ":" in args.rdzv_endpoint else (args.rdzv_endpoint, "", str(DEFAULT_PORT))
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--rdzv-endpoint {args.rdzv_endpoint}: expected HOST:PORT with a port in 1..65535")
    return host, int(port)


def _name_this_host(args: argparse.Namespace, meeting: Meeting) -> None:
    """Has ranks use the address and interface through which the hosts met.

    Host names often lead to 127.0.1.1, which gloo would then listen on; what reached the store reaches the other hosts too.
    """
    if meeting.address and not meeting.address.startswith("127."):
        args.local_addr = args.local_addr or meeting.address
        if interface := interface_of(meeting.address):
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME") or interface
    elif not is_resolvable(socket.getfqdn()):
        args.local_addr = args.local_addr or "127.0.0.1"


def _share_cores(ranks_per_host: str) -> None:
    """Gives each rank its share of this host's cores, unless OMP_NUM_THREADS says otherwise; torchrun would give it one and warn."""
    if ranks_per_host.isdigit() and int(ranks_per_host):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(ranks_per_host))))


def _end(text: str, code: int) -> int:
    print(f"torchrec_kstep.launch: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
