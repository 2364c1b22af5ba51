#!/usr/bin/env bash
# The part of pod.sh that runs on a host: sets it up, and starts, shows and stops the main.py of this clone only.
#
#   scripts/on_host.sh prepare            install Python if there is no recent one, then run ./prepareTPUVM.sh
#   scripts/on_host.sh start ARGUMENTS    start main.py ARGUMENTS, detached; its output is appended to .pod/log
#   scripts/on_host.sh status             print one line: never started | running PID | ended CODE
#   scripts/on_host.sh log [--follow]     print the last 200 lines of .pod/log
#   scripts/on_host.sh stop SECONDS       SIGTERM, so that it saves; SIGKILL after SECONDS; then remove a stale TPU lock
#
# .pod/process holds the process id and start time of main.py.  A process is signalled only if both still match and it
# runs in this clone, so that a process that reuses the id is never touched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=${TPU_LOCK:-/tmp/libtpu_lockfile}

fail() {
    echo "error: $*" >&2
    exit 2
}

process_facts() { # print the state of process $1 (R, S, ..., Z for a zombie) and its start time in clock ticks since boot
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) && cut -d ' ' -f 1,20 <<<"${stat##*) }" # the fields after the name in brackets
}

running_id() { # print the process id of this clone's main.py, if it is running
    local id recorded state started
    [[ -f .pod/process ]] && read -r id recorded <.pod/process || return 1
    read -r state started < <(process_facts "$id") || return 1
    [[ $state != Z && $started == "$recorded" && $(readlink "/proc/$id/cwd") == "$PWD" ]] && echo "$id"
}

prepare() {
    local found=""
    for python in python3.13 python3.12 python3.11 python3; do
        "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && found=1 && break
    done
    if [[ -z $found ]]; then
        echo "no Python 3.11 or newer: installing python3.11 and python3.11-venv with apt-get"
        if ! { sudo -n apt-get update -qq && sudo -n apt-get install -y -qq python3.11 python3.11-venv; }; then
            fail "apt-get failed (above); install Python 3.11 or newer on every host by hand, then run setup again"
        fi
    fi
    ./prepareTPUVM.sh "$@"
}

start() {
    local id
    if id=$(running_id); then fail "main.py is running here as process $id; stop it first: pod.sh stop NAME"; fi
    [[ -x .venv/bin/python ]] || fail "$PWD has no .venv; run first: pod.sh setup NAME"
    mkdir -p .pod
    rm -f .pod/process .pod/ended
    setsid --fork scripts/on_host.sh supervise "$@" >>.pod/log 2>&1 </dev/null
    for _ in {1..100}; do
        [[ -s .pod/process ]] && status && return
        sleep 0.1
    done
    fail "main.py did not start; see $PWD/.pod/log"
}

supervise() { # the detached part of start: wait for main.py, which may take days, and record its exit code
    local code=0
    printf '== %s' "$(date -u +%FT%TZ) main.py" && printf ' %q' "$@" && echo
    .venv/bin/python main.py "$@" &
    echo "$! $(process_facts $! | cut -d ' ' -f 2)" >.pod/process.new
    mv .pod/process.new .pod/process
    wait $! || code=$?
    echo "$code" >.pod/ended
}

status() {
    local id
    if id=$(running_id); then
        echo "running $id"
    elif [[ -f .pod/ended ]]; then
        echo "ended $(cat .pod/ended)"
    elif [[ -f .pod/process ]]; then
        echo "ended 137" # the supervisor ended too: the machine was rebooted, or both were killed
    else
        echo "never started"
    fi
}

stop() {
    local id seconds=$1
    if id=$(running_id); then
        echo "asking process $id to save and end, for up to $seconds s"
        kill -TERM "$id" 2>/dev/null || true # it may have just ended
        for ((i = 0; i < seconds * 10; i++)); do
            running_id >/dev/null || break
            sleep 0.1
        done
        if id=$(running_id); then
            echo "process $id has not ended in $seconds s: killing it; earlier checkpoints are intact"
            kill -KILL "$id" 2>/dev/null || true
        fi
        for _ in {1..50}; do # until the supervisor has recorded the exit code
            [[ -f .pod/ended ]] && break
            sleep 0.1
        done
    fi
    status
    unlock
}

unlock() { # remove the lock that libtpu leaves behind when it is killed, and which then keeps it from starting
    [[ -e $lock ]] || return 0
    local descriptor
    if [[ ! -O $lock ]]; then
        echo "$lock belongs to another user: not removed"
        return 0
    fi
    for descriptor in /proc/[0-9]*/fd/*; do
        if [[ $descriptor -ef $lock ]]; then
            descriptor=${descriptor#/proc/}
            echo "$lock is held by process ${descriptor%%/*}: not removed"
            return 0
        fi
    done
    rm -f "$lock"
    echo "$lock was held by no process: removed"
}

show_log() {
    [[ -f .pod/log ]] || fail "nothing was started here yet; run first: pod.sh run NAME"
    exec tail -n 200 ${1:+"$1"} .pod/log
}

case "${1:-}" in
prepare | start | supervise | status) "$@" ;;
log) show_log "${2:-}" ;;
stop)
    # At most eight digits, so that the number of tenths fits, and none that bash would take for octal.
    [[ ${2:-} =~ ^0*([0-9]{1,8})$ ]] || fail "$0 stop ${2:-}: give the number of seconds to wait for a save, as in stop 300"
    stop "${BASH_REMATCH[1]}"
    ;;
*) fail "usage: $0 prepare | start ARGUMENTS | status | log [--follow] | stop SECONDS" ;;
esac
