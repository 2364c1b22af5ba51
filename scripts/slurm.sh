#!/usr/bin/env bash
# A run on GPU nodes under Slurm, one process for each GPU, begun again whenever it is preempted or out of time.
#
#   sbatch --nodes=2 scripts/slurm.sh model=6_9b data=minipile mesh.dp=2 mesh.mp=8 run.name=big
#
# from the clone, on a file system that all nodes share, after ./prepareGPUVM.sh there.  What stands below is sbatch's
# default and may be given on its command line: --gpus-per-node with the --ntasks-per-node to go with it, --time,
# --partition, --qos.  Not --gpus-per-task: each process chooses its GPU of the node by its SLURM_LOCALID.
#
#SBATCH --job-name=shmap_tp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

[[ -n ${SLURM_NTASKS:-} ]] || fail "this is for Slurm: sbatch --nodes=1 scripts/slurm.sh key=value ..."
cd "${SLURM_SUBMIT_DIR:-.}"
[[ -f main.py ]] || fail "$PWD has no main.py; call sbatch in the clone"
[[ -x .venv/bin/python ]] || fail "$PWD has no .venv; run ./prepareGPUVM.sh on a GPU node first"
[[ " $* " == *" --cfg "* ]] || set -- --cfg conf/config.yaml "$@"
[[ " $* " == *" --resume "* || " $* " == *" checkpoint.resume="* ]] || set -- "$@" checkpoint.resume=if_present

# SIGTERM, at a preemption or 300 s before the time is up, is for main.py: it saves and exits with 75.  The first
# process to exit does not end the others, which may still be saving; what is left ten minutes later is ended.
trap 'echo "told to stop: waiting for main.py to save"' TERM
srun --kill-on-bad-exit=0 --wait=600 .venv/bin/python main.py "$@" "mesh.processes=$SLURM_NTASKS" &
step=$! code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # the signal ended the wait, not the step
    code=0
    wait "$step" || code=$?
done

if [[ $code -eq 75 ]]; then
    echo "stopped and saved: job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID" || fail "Slurm did not take it back (above); go on with: sbatch scripts/slurm.sh $*"
fi
exit "$code"
