#!/usr/bin/env bash
# Rents TPU slices with gcloud from your machine, and runs main.py on them.  docs/pods.md is the guide.
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
  create    rent NAME: --type v4-32 and options below; returns when it is ready, or with --queued or --slices when queued;
            the arguments of main.py, if given, are checked first: mesh, hosts, data, tokenizer, buckets
  setup     copy this clone's tracked files to ~/shmap_tp on every host (or clone --repository URL), install, test
  run       start main.py on every host, detached, with the arguments after --
  status    the state of NAME, its number of hosts, and the state of main.py on each host
  logs      the last lines of process 0's log; with --follow also new ones
  stop      main.py saves and ends on every host; after --seconds (300) it is killed; no other process is signalled
  delete    give NAME back; its disks are lost
  train     check the arguments of main.py, then create, setup and run, repeatedly, until main.py is done;
            needs checkpoint.dir=gs://...

options
  --zone ZONE, --project PROJECT       default: those of gcloud (gcloud config set compute/zone ZONE)
  --type TYPE                          v2-8, v3-32, v4-32, v5litepod-16, v5p-32, v6e-16, ...
  --version VERSION                    software of the VM; default: the one for the type
  --spot | --preemptible | --reserved  cheaper but preemptible | the older kind of that | from your reservation
  --queued                             wait in the queue for capacity instead of failing without it
  --any 'TYPE TYPE ...'                train: in place of --type, the first of these that is given; needs mesh.dp=auto
  --patience SECONDS                   train --any: how long a type is waited for before the next one is asked for (600)
  --slices N                           N slices of the type, queued, as one pod: NAME-0, NAME-1, ...
  --network NETWORK                    for example one with an MTU of 8896; default: the project's default network
  --poll SECONDS                       train: interval between two checks of the hosts (60)
  --dry-run                            check the arguments of main.py; print every command, and run none
  --unchecked                          create, train, --dry-run: do not check the arguments of main.py here

example
  scripts/pod.sh train big --type v3-32 --spot -- --cfg conf/recipes/6_9b_v3-32.yaml data.dir=gs://BUCKET/fineweb \
      data.cache=null checkpoint.dir=gs://BUCKET/big

Repeat the options that identify NAME (--zone, --project, --queued, --slices) with every step.

exit codes
  0 done    1 gcloud or a host failed, see above    2 bad input, explained in one or two lines
  train: 0 main.py is done, 2 main.py refused its input, 1 five failures in a row
TEXT
}

fail() {
    echo "error: $*" >&2
    exit 2
}

need() { # fail if option $1 has no value; $2 is the number of remaining words
    [[ $2 -ge 2 ]] || fail "$1 needs a value; see scripts/pod.sh --help"
}

[[ ${BASH_VERSINFO[0]} -ge 5 ]] || fail "bash $BASH_VERSION is too old, 5 is needed (macOS: brew install bash)"
case "${1:-}" in
"" | -h | --help) help && exit ;;
create | setup | run | status | logs | stop | delete | train) step=$1 ;;
*) fail "$1 is not a step; use one of create, setup, run, status, logs, stop, delete, train" ;;
esac
name=${2:-}
[[ -n $name && $name != -* ]] || fail "pod.sh $step: name the pod, as in pod.sh $step my-pod"
[[ $name =~ ^[a-z]([-a-z0-9]{0,60}[a-z0-9])?$ ]] || fail "$name: a name has lower-case letters, digits and - only"
shift 2

location=() type="" version="" tier="" queued="" slices=1 network="" dry="" unchecked="" follow="" seconds=300 poll=60 patience=600 types=() repository="" arguments=()
while [[ $# -gt 0 ]]; do
    case "$1" in
    --zone | --project) need "$1" $# && location+=("$1=$2") && shift ;;
    --type) need "$1" $# && type=$2 && shift ;;
    --any) need "$1" $# && read -ra types <<<"$2" && shift ;;
    --patience) need "$1" $# && patience=$2 && shift ;;
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
    --unchecked) unchecked=1 ;;
    --)
        shift
        arguments=("$@")
        break
        ;;
    *) fail "$1 is not an option of pod.sh; arguments of main.py come after --, see scripts/pod.sh --help" ;;
    esac
    shift
done
[[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices $slices: give a number of slices, 1 or more"
[[ $seconds =~ ^[0-9]+$ ]] || fail "--seconds $seconds: give a number of seconds"
[[ $patience =~ ^[0-9]{1,8}$ ]] || fail "--patience $patience: give a number of seconds"
[[ $poll =~ ^0*([0-9]{1,8})$ ]] || fail "--poll $poll: give a number of seconds"
poll=${BASH_REMATCH[1]} # bash would take a number with leading zeros for octal
[[ $slices -eq 1 ]] || queued=1
[[ ${#types[@]} -eq 0 || ($step == train && -z $type) ]] || fail "--any is for train, in place of --type"
[[ -z ${arguments[*]} || $step =~ ^(create|run|train)$ ]] || fail "pod.sh $step takes no arguments of main.py"
[[ -n $dry ]] || command -v gcloud >/dev/null ||
    fail "gcloud is not installed; see https://cloud.google.com/sdk/docs/install, then: gcloud auth login"
temporary=$(mktemp -d "${TMPDIR:-/tmp}/shmap_tp.XXXXXXXX") # this user's only, with a name that nobody can predict
trap 'rm -rf "$temporary"' EXIT
gcloud_errors=$temporary/errors
: >"$gcloud_errors"

case "$step" in
create) create ;;
setup) setup ;;
run) run ;;
status) show_status ;;
logs) on_node "$(first_node)" 0 log ${follow:+"$follow"} || explain ;;
stop) on_all_hosts stop "$seconds" || explain ;;
delete) delete ;;
train) train ;;
esac
