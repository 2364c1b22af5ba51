#!/usr/bin/env bash
# Creates .venv beside this script with the packages for training, then tests a sum over all devices.
#
#   ./prepareTPUVM.sh           on a TPU VM; on a pod slice run it on all hosts at once, in the clone on each:
#                               gcloud compute tpus tpu-vm ssh NAME --worker=all --command='shmap_tp/prepareTPUVM.sh'
#   ./prepareTPUVM.sh --cuda    on a machine with NVIDIA GPUs, as prepareGPUVM.sh does
#   ./prepareTPUVM.sh --cpu     on any machine, with eight emulated devices
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() {
    echo "error: $*" >&2
    exit 2
}

check_failed() {
    [[ $1 -ne 124 ]] || fail "no answer within five minutes; on a pod slice, run this on all hosts at once"
    fail "the test of the devices failed (see above)"
}

usage="usage: $0 [--tpu | --cuda | --cpu]"
[[ $# -le 1 ]] || fail "$usage"
case "${1:---tpu}" in
--tpu) backend=tpu extras=tpu,test ;;
--cuda) backend=gpu extras=cuda,test ;;
--cpu) backend=cpu extras=test ;;
*) fail "$usage" ;;
esac

python=""
for candidate in python3.13 python3.12 python3.11 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || fail "this needs Python 3.11 or newer with its venv module; found $(python3 --version 2>&1 || true)
install it with sudo apt-get install python3.11 python3.11-venv, or https://docs.astral.sh/uv/ : uv python install 3.12"

echo "$("$python" --version): installing .[$extras] into .venv"
"$python" -m venv .venv || fail "could not create .venv with $python (see above); remove an old .venv and try again"
.venv/bin/python -m pip install --quiet --upgrade pip || fail "pip cannot reach a package index (see above)"
.venv/bin/python -m pip install --quiet -e ".[$extras]" || fail "pip could not install .[$extras] (see above)"

echo "testing a sum over all $backend devices"
timeout --kill-after=10 300 .venv/bin/python - "$backend" <<'PYTHON' || check_failed $?
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

backend = sys.argv[1]
if backend == "cpu":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
if backend == "tpu":
    try:
        jax.distributed.initialize()
    except ValueError as error:  # this host is not part of a larger slice
        print(f"one host: {error}")
if jax.default_backend() != backend:
    sys.exit(f"JAX finds no {backend}, only {jax.default_backend()}; check the driver, and for other processes")

count = jax.device_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
numbers = np.arange(1, count + 1, dtype=np.int32)
sharded = jax.make_array_from_callback((count,), NamedSharding(mesh, P("devices")), lambda index: numbers[index])
add = jax.shard_map(lambda shard: jax.lax.psum(shard, "devices"), mesh=mesh, in_specs=P("devices"), out_specs=P())
found = int(jax.jit(add)(sharded).addressable_data(0)[0])
expected = count * (count + 1) // 2
if found != expected:
    sys.exit(f"the sum over {count} devices is {found} instead of {expected}: a device or a link is faulty")
kind, hosts = jax.devices()[0].device_kind, jax.process_count()
print(f"jax {jax.__version__}, hosts: {hosts}, devices: {count} x {kind}; the sum over all of them is correct")
PYTHON

echo "ready; next: source .venv/bin/activate && pytest -m quick && python main.py --cfg conf/config.yaml"
