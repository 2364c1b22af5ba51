#!/usr/bin/env bash
# pod.sh train: keep a run going on slices that are taken away.  Sourced by pod.sh; uses the steps of pod_steps.sh.
# shellcheck disable=SC2154,SC2034
tries=5 # failures in a row, of gcloud or main.py, after which it gives up; the pause before the next doubles

train() {
    local failures=0 code
    keeps_going
    if [[ -n $dry ]]; then
        order && install && everywhere start "${arguments[@]}" && everywhere status
        return
    fi
    while true; do
        code=0
        attempt || code=$?
        case $code in
        0) echo "$name: main.py is done; give the slices back: pod.sh delete $name" && return ;;
        2) echo "error: main.py refused its input; see pod.sh logs $name" >&2 && exit 2 ;;
        75) failures=0 && echo "$name: stopped and saved, or taken away: going on" ;;
        *) failures=$((failures + 1)) && echo "$name: failure $failures of $tries (above, and pod.sh logs $name)" ;;
        esac
        [[ $failures -lt $tries ]] || { echo "error: $tries failures in a row; giving up" >&2 && exit 1; }
        sleep $((failures == 0 ? poll : poll << failures))
    done
}

keeps_going() { # the arguments that let a run go on where no disk of the last slice is left
    local given=" ${arguments[*]} "
    [[ $given != *" --resume "* ]] || fail "train goes on by itself; leave --resume out"
    [[ $given == *" checkpoint.dir=gs://"* || $given == *" checkpoint.dir=/"* ]] ||
        fail "train may lose the disks of $name at any time: give checkpoint.dir=gs://BUCKET/... (or a mounted /...)"
    [[ $given == *" --cfg "* ]] || arguments=(--cfg conf/config.yaml "${arguments[@]}")
    [[ $given == *" checkpoint.resume="* ]] || arguments+=(checkpoint.resume=if_present)
}

attempt() { # one life of the slices: 0 done, 2 refused, 75 stopped or taken away, 1 failed
    have || return 1
    install || return "$(or_taken)"
    everywhere start "${arguments[@]}" || return "$(or_taken)"
    watch
}

have() { # slices that may be used: those that are there, or new ones in place of what was taken away
    local found
    while true; do
        found=$(state 2>/dev/null) || found=""
        case "$found" in
        READY | ACTIVE) return 0 ;;
        "") order || return 1 ;;
        FAILED | SUSPENDED | PREEMPTED | TERMINATED | STOPPED) (delete) || return 1 ;;
        *) echo "$name: $found" ;;
        esac
        sleep "$poll"
    done
}

or_taken() { # prints 75 where the slices are gone, else 1
    case "$(state 2>/dev/null)" in READY | ACTIVE) echo 1 ;; *) echo 75 ;; esac
}

watch() { # until main.py has ended on one host; then it is ended on all, so that they start together again
    local said misses=0 code
    while true; do
        sleep "$poll"
        if ! said=$(everywhere status); then
            misses=$((misses + 1)) code=$(or_taken)
            [[ $code == 1 && $misses -lt $tries ]] || return "$code"
            continue
        fi
        misses=0
        [[ $said == *ended* || $said == *never* ]] || continue
        [[ $said == *running* ]] && everywhere stop "$seconds" && said=$(everywhere status)
        code=$(grep -Eo 'ended [0-9]+' <<<"$said" | sort -u)
        echo "$name: $(tr '\n' ' ' <<<"$code")"
        case "$code" in
        "ended 0") return 0 ;;
        *"ended 2"$'\n'* | *"ended 2") return 2 ;;
        "ended 75") return 75 ;;
        *) return 1 ;;
        esac
    done
}
