"""python main.py --cfg conf/config.yaml [key=value ...] [--resume]: train, or continue a run."""

import argparse
import os
import signal
import sys

HELP = """\
examples
  python main.py --cfg conf/config.yaml                                  train a small model on this machine
  python main.py --cfg conf/config.yaml train.steps=600 --resume         continue from its newest checkpoint
  python main.py --cfg conf/config.yaml mesh.dp=8 mesh.mp=1 --resume     the same on another mesh shape
  python main.py --cfg conf/config.yaml model=6_9b data=minipile mesh.dp=4 mesh.mp=8 run.name=big

key=value
  mesh.dp, mesh.mp      data-parallel and tensor-parallel size; their product is the number of devices, which are
                        emulated on a machine that has only a CPU; mesh.dp=auto uses all devices
  model=NAME            a model of conf/model/: {models}
  data=NAME             a data source of conf/data/: {data}
  train.steps, train.batch, train.microbatches, optimizer.learning_rate, run.name, ...
                        all keys are in conf/config.yaml and explained in shmap_tp/config/schema.py

exit codes
  0   finished
  2   an error that is explained in one or two lines: bad input, a full disk, faulty hardware, a diverged run
  75  stopped by SIGTERM, Ctrl-C or a preemption notice, and saved: start again with --resume
  69  another process did not start in time or was lost (134 if that was process 0): start all processes again

several processes, one per host
  TPU slice, GKE, Slurm    run the same command on every host, with --processes N
  elsewhere                add the same --coordinator HOST:PORT on all hosts, and a different --process-id on each
"""


def main() -> int:
    from shmap_tp.config.compose import CONF, load
    from shmap_tp.config.validate import validate_process_arguments
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
    parser.add_argument("--cfg", metavar="FILE", required=True, help="configuration file, for example conf/config.yaml")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    parser.add_argument("--processes", type=int, metavar="N", help="number of processes; sets mesh.processes")
    parser.add_argument("--process-id", type=int, metavar="I", help="number of this process, 0 to N-1")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="host of process 0, and a free port there")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides a value of FILE")
    arguments = parser.parse_intermixed_args()
    overrides = list(arguments.overrides)
    if arguments.resume:
        overrides.append("checkpoint.resume=must")
    if arguments.processes is not None:
        overrides.append(f"mesh.processes={arguments.processes}")
    try:
        config = load(arguments.cfg, overrides)
        validate_process_arguments(arguments.coordinator, arguments.process_id, config.mesh.processes)
        from shmap_tp.runtime.distributed import Coordinator
        from shmap_tp.training.loop import train

        coordinator = Coordinator(arguments.coordinator, arguments.process_id) if arguments.coordinator else None
        return train(config, coordinator)
    except ShmapTpError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda number, frame: os._exit(75)
    )  # nothing to save yet; `train` replaces this handler
    code = main()
    if code == 75 and not sys.modules["jax"].distributed.is_initialized():
        # All files are closed, but programs that still run on the devices could crash the interpreter at its exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
