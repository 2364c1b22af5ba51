#!/usr/bin/env bash
# Creates .venv on a machine with NVIDIA GPUs and tests a sum over all of them.  Only the driver must be installed: CUDA
# comes with the Python packages.
#
#   ./prepareGPUVM.sh
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/prepareTPUVM.sh" "${1:---cuda}"
