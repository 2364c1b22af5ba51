#!/usr/bin/env bash
# Makes .venv on a machine with NVIDIA GPUs (only the driver must be there: CUDA comes with the packages), tests it.
#
#   ./prepareGPUVM.sh           --cpu instead tries the same on any machine
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/prepareTPUVM.sh" "${1:---cuda}"
