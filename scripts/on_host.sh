#!/usr/bin/env bash
# One host's part of pod.sh: makes it ready; starts, shows and stops the main.py of this clone, and nothing else.
#
#   scripts/on_host.sh prepare            Python where there is none that is new enough, then ./prepareTPUVM.sh
#   scripts/on_host.sh start ARGUMENTS    main.py ARGUMENTS, detached; its output is added to .pod/log
#   scripts/on_host.sh status             one line: never started | running PID | ended CODE
#   scripts/on_host.sh log [--follow]     the last 200 lines of .pod/log
#   scripts/on_host.sh stop SECONDS       SIGTERM, so that it saves; SIGKILL after SECONDS; then a stale TPU lock goes
#
# Whose a process is: .pod/process holds its id and the moment it started.  Only where both still agree, and it runs in
# this clone, is it signalled: an id that the system has given to another process is left alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lock=${TPU_LOCK:-/tmp/libtpu_lockfile}

fail() {
    echo "error: $*" >&2
    exit 2
}

facts() { # of process $1: its state (R, S, ..., Z for one that has ended), and when it began, in clock ticks since boot
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) && cut -d ' ' -f 1,20 <<<"${stat##*) }" # after the name in brackets
}

ours() { # prints the id of our main.py, where it is running
    local id began state moment
    [[ -f .pod/process ]] && read -r id began <.pod/process || return 1
    read -r state moment < <(facts "$id") || return 1
    [[ $state != Z && $moment == "$began" && $(readlink "/proc/$id/cwd") == "$PWD" ]] && echo "$id"
}

prepare() {
    local found=""
    for python in python3.13 python3.12 python3.11 python3; do
        "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && found=1 && break
    done
    if [[ -z $found ]]; then
        echo "no Python 3.11 or newer: installing python3.11 and python3.11-venv with apt-get"
        if ! { sudo -n apt-get update -qq && sudo -n apt-get install -y -qq python3.11 python3.11-venv; }; then
            fail "apt-get could not (above); install Python 3.11 or newer on every host by hand, then setup again"
        fi
    fi
    ./prepareTPUVM.sh "$@"
}

start() {
    local id
    if id=$(ours); then fail "main.py is running here as process $id; stop it first: pod.sh stop NAME"; fi
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

supervise() { # the detached half of start: waits for main.py, which may take days, and keeps its exit code
    local code=0
    printf '== %s' "$(date -u +%FT%TZ) main.py" && printf ' %q' "$@" && echo
    .venv/bin/python main.py "$@" &
    echo "$! $(facts $! | cut -d ' ' -f 2)" >.pod/process.new
    mv .pod/process.new .pod/process
    wait $! || code=$?
    echo "$code" >.pod/ended
}

status() {
    local id
    if id=$(ours); then
        echo "running $id"
    elif [[ -f .pod/ended ]]; then
        echo "ended $(cat .pod/ended)"
    elif [[ -f .pod/process ]]; then
        echo "ended 137" # with its supervisor: the machine was started again, or both were killed
    else
        echo "never started"
    fi
}

stop() {
    local id seconds=$1
    if id=$(ours); then
        echo "asking process $id to save and end, for up to $seconds s"
        kill -TERM "$id" 2>/dev/null || true # it may have ended just now
        for ((i = 0; i < seconds * 10; i++)); do
            ours >/dev/null || break
            sleep 0.1
        done
        if id=$(ours); then
            echo "process $id has not ended in $seconds s: killing it; what it saved before is intact"
            kill -KILL "$id" 2>/dev/null || true
        fi
        for _ in {1..50}; do # its exit code, by the supervisor
            [[ -f .pod/ended ]] && break
            sleep 0.1
        done
    fi
    status
    unlock
}

unlock() { # libtpu leaves its lock behind when it is killed, and then refuses to start
    [[ -e $lock ]] || return 0
    local descriptor
    if [[ ! -O $lock ]]; then
        echo "$lock is another user's: left alone"
        return 0
    fi
    for descriptor in /proc/[0-9]*/fd/*; do
        if [[ $descriptor -ef $lock ]]; then
            descriptor=${descriptor#/proc/}
            echo "$lock is held by process ${descriptor%%/*}: left alone"
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
    [[ ${2:-} =~ ^[0-9]+$ ]] || fail "$0 stop ${2:-}: give the seconds that a save may take, as in stop 300"
    stop "$2"
    ;;
*) fail "usage: $0 prepare | start ARGUMENTS | status | log [--follow] | stop SECONDS" ;;
esac
