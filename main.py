"""python main.py --cfg conf/config.yaml [key=value ...] [--resume]: train, or go on training."""

import argparse
import os
import signal
import sys

HELP = """\
examples
  python main.py --cfg conf/config.yaml                                  the first run: a small model, on this machine
  python main.py --cfg conf/config.yaml train.steps=600 --resume         go on from its newest checkpoint
  python main.py --cfg conf/config.yaml mesh.dp=8 mesh.mp=1 --resume     the same, on another mesh shape
  python main.py --cfg conf/config.yaml model=6_9b data=minipile mesh.dp=4 mesh.mp=8 run.name=big

key=value
  mesh.dp, mesh.mp      data- and model-parallel size; together as many as there are devices (a CPU emulates them);
                        mesh.dp=auto takes all there are
  model=NAME            a shape of conf/model/: {models}
  data=NAME             a source of conf/data/: {data}
  train.steps, train.batch, train.microbatches, optimizer.learning_rate, run.name, ...
                        every key of conf/config.yaml; shmap_tp/config.py has a sentence on each

exit codes
  0 done    2 bad input, a full disk, or steps that fail one after the other, explained in a line or two
  75 told to stop (SIGTERM, Ctrl-C) and saved: start again with --resume
  69 other processes were not there in time, or one was lost (134 where that was process 0): start all again

several processes, one per host
  on a TPU slice, GKE or Slurm    the same command on every host, with --processes N
  elsewhere                       and with --coordinator HOST:PORT, the same for all, and a --process-id for each
"""


def main() -> int:
    from shmap_tp.config.compose import CONF, load
    from shmap_tp.config.validate import check_place
    from shmap_tp.errors import ShmapTpError

    names = {
        group: ", ".join(sorted(file.stem for file in (CONF / group).glob("*.yaml"))) for group in ("model", "data")
    }
    parser = argparse.ArgumentParser(
        usage="%(prog)s --cfg FILE [--resume] [--processes N [--coordinator HOST:PORT --process-id I]] [key=value ...]",
        description="Tensor-parallel transformer training over a (dp, mp) mesh, with every collective written by hand.",
        epilog=HELP.format(models=names["model"], data=names["data"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cfg", metavar="FILE", required=True, help="configuration, such as conf/config.yaml")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--processes", type=int, metavar="N", help="how many train together; sets mesh.processes")
    parser.add_argument("--process-id", type=int, metavar="I", help="which of them this is, 0 to N-1")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0: its host and a free port there")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of FILE")
    arguments = parser.parse_intermixed_args()
    given = ["checkpoint.resume=must"] if arguments.resume else []
    given += [f"mesh.processes={arguments.processes}"] if arguments.processes is not None else []
    try:
        config = load(arguments.cfg, arguments.overrides + given)
        check_place(arguments.coordinator, arguments.process_id, config.mesh.processes)
        from shmap_tp.runtime.distributed import Coordinator
        from shmap_tp.training.loop import train

        return train(
            config, Coordinator(arguments.coordinator, arguments.process_id) if arguments.coordinator else None
        )
    except ShmapTpError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(75))  # nothing to save; `train` takes over
    code = main()
    if code == 75 and not sys.modules["jax"].distributed.is_initialized():
        # All is written and closed; but what still runs on the devices could crash the interpreter as it ends.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
