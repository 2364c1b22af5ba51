#!/usr/bin/env bash
# A TPU slice, or several, from nothing to a run, by gcloud from your machine.  docs/pods.md is the guide.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/pod_steps.sh
. "$here/pod_steps.sh"
# shellcheck source=scripts/pod_train.sh
. "$here/pod_train.sh"

help() {
    cat <<'TEXT'
scripts/pod.sh STEP NAME [options] [-- arguments of main.py]

steps
  create    rent NAME: --type v4-32 and what is below; returns when it is there, or with --queued or --slices in a queue
  setup     copy this working tree to ~/shmap_tp of every host (or --repository URL: clone it), install, test the devices
  run       start main.py on every host, detached, with the arguments after --
  status    the state of NAME, how many hosts it has, and what main.py does on each
  logs      the last lines that process 0 has written; --follow: and those to come
  stop      have main.py save and end on every host; --seconds (300) later it is killed.  No other process is touched
  delete    give NAME back; what is on its disks is lost
  train     all of it: create, setup and run, again and again, until main.py is done; needs checkpoint.dir=gs://...

options
  --zone ZONE, --project PROJECT       without them gcloud's own: gcloud config set compute/zone ZONE
  --type TYPE                          v2-8, v3-32, v4-32, v5litepod-16, v5p-32, v6e-16, ...
  --version VERSION                    of the VM's software; without it, what fits the type
  --spot | --preemptible | --reserved  cheaper, but taken away at any time | the older kind of that | what you reserved
  --queued                             wait in the queue for capacity instead of failing where there is none
  --slices N                           so many slices of the type, queued, as one: NAME-0, NAME-1, ...
  --network NETWORK                    such as one with an MTU of 8896; without it the project's default
  --poll SECONDS                       train: between two looks at the hosts, 60 without it
  --dry-run                            print every command as it would be run, and run none

An option that says what NAME is (--zone, --project, --queued, --slices) goes with every step of it.

exit codes
  0 done    1 gcloud or a host failed, see above    2 a mistake, explained in a line or two
  train: 0 when main.py was done, 2 when it refused its input, 1 after five failures in a row
TEXT
}

fail() {
    echo "error: $*" >&2
    exit 2
}

need() { # an option's value
    [[ $2 -ge 2 ]] || fail "$1 needs a value; see scripts/pod.sh --help"
}

[[ ${BASH_VERSINFO[0]} -ge 5 ]] || fail "bash $BASH_VERSION is too old, 5 is needed (macOS: brew install bash)"
case "${1:-}" in
"" | -h | --help) help && exit ;;
create | setup | run | status | logs | stop | delete | train) step=$1 ;;
*) fail "$1 is no step; use one of create, setup, run, status, logs, stop, delete, train" ;;
esac
name=${2:-}
[[ -n $name && $name != -* ]] || fail "pod.sh $step: name the pod, as in pod.sh $step my-pod"
[[ $name =~ ^[a-z]([-a-z0-9]{0,60}[a-z0-9])?$ ]] || fail "$name: a name is of lower-case letters, digits and -"
shift 2

place=() type="" version="" tier="" queued="" slices=1 network="" dry="" follow="" seconds=300 poll=60 repository="" arguments=()
while [[ $# -gt 0 ]]; do
    case "$1" in
    --zone | --project) need "$1" $# && place+=("$1=$2") && shift ;;
    --type) need "$1" $# && type=$2 && shift ;;
    --version) need "$1" $# && version=$2 && shift ;;
    --slices | --node-count) need "$1" $# && slices=$2 && shift ;;
    --network) need "$1" $# && network=$2 && shift ;;
    --seconds) need "$1" $# && seconds=$2 && shift ;;
    --poll) need "$1" $# && poll=$2 && shift ;;
    --repository) need "$1" $# && repository=$2 && shift ;;
    --spot | --preemptible | --reserved)
        [[ -z $tier ]] || fail "$tier and $1: choose one"
        tier=$1
        ;;
    --queued) queued=1 ;;
    --follow) follow=--follow ;;
    --dry-run) dry=1 ;;
    --)
        shift
        arguments=("$@")
        break
        ;;
    *) fail "$1 is no option of pod.sh; those of main.py come after --, see scripts/pod.sh --help" ;;
    esac
    shift
done
[[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices $slices: give how many, 1 or more"
[[ $seconds =~ ^[0-9]+$ ]] || fail "--seconds $seconds: give a number of seconds"
[[ $poll =~ ^[0-9]+$ ]] || fail "--poll $poll: give a number of seconds"
[[ $slices -eq 1 ]] || queued=1
[[ -z ${arguments[*]} || $step == run || $step == train ]] || fail "pod.sh $step takes no arguments of main.py"
[[ -n $dry ]] || command -v gcloud >/dev/null ||
    fail "gcloud is not installed; see https://cloud.google.com/sdk/docs/install, then: gcloud auth login"
heard=$(mktemp)
trap 'rm -f "$heard"' EXIT

case "$step" in
create) create ;;
setup) setup ;;
run) run ;;
status) show_status ;;
logs) on_node "$(first_node)" 0 log ${follow:+"$follow"} || explain ;;
stop) everywhere stop "$seconds" || explain ;;
delete) delete ;;
train) train ;;
esac
