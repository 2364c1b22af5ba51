#!/usr/bin/env bash
# Trains on GPU nodes under Slurm, one process per GPU; the job is requeued when it is preempted or out of time.
#
#   sbatch --nodes=1 scripts/slurm.sh --cfg conf/recipes/llama3_8b_8xh100.yaml
#   sbatch --nodes=2 scripts/slurm.sh --cfg conf/recipes/llama3_8b_8xh100.yaml mesh.dp=16 train.microbatches=8
#   sbatch --nodes=1-4 scripts/slurm.sh --cfg conf/recipes/llama3_8b_8xh100.yaml mesh.dp=auto \
#       train.max_sequences_per_device=1     # on as many of them as are free, also when the job is requeued
#
# Submit from the clone, on a file system that all nodes share, after ./prepareGPUVM.sh there.  The #SBATCH lines are
# defaults; the command line of sbatch overrides them: --gpus-per-node with an equal --ntasks-per-node, --time,
# --partition, --qos.  Do not use --gpus-per-task: each process selects its GPU by its SLURM_LOCALID.
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

[[ -n ${SLURM_NTASKS:-} ]] || fail "this is for Slurm: sbatch --nodes=1 scripts/slurm.sh --cfg FILE key=value ..."
cd "${SLURM_SUBMIT_DIR:-.}"
[[ -f main.py ]] || fail "$PWD has no main.py; run sbatch in the clone"
[[ -x .venv/bin/python ]] || fail "$PWD has no .venv; run ./prepareGPUVM.sh on a GPU node first"
[[ " $* " == *" --cfg "* ]] || set -- --cfg conf/base.yaml "$@"
[[ " $* " == *" --resume "* || " $* " == *" checkpoint.resume="* ]] || set -- "$@" checkpoint.resume=if_present

# At a preemption, or 300 s before the time limit, SIGTERM reaches main.py, which saves and exits with 75.  The first
# process to exit does not end the others, which may still be saving; srun ends those left after ten minutes.
trap 'echo "stop requested: waiting for main.py to save"' TERM
tasks=$SLURM_NTASKS
[[ -z ${SLURM_NTASKS_PER_NODE:-} ]] || tasks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE)) # of the nodes that were given
srun --ntasks="$tasks" --kill-on-bad-exit=0 --wait=600 .venv/bin/python main.py "$@" "mesh.processes=$tasks" &
step=$! code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # the signal interrupted wait, not the step
    code=0
    wait "$step" || code=$?
done

if [[ $code -eq 75 ]]; then
    echo "stopped and saved: requeueing job $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID" || fail "Slurm did not requeue the job (above); continue with: sbatch scripts/slurm.sh $*"
fi
exit "$code"
