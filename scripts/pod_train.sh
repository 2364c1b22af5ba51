#!/usr/bin/env bash
# pod.sh train: keep a run going on preemptible slices.  Sourced by pod.sh; uses the steps in pod_steps.sh.
# shellcheck disable=SC2154,SC2034
max_failures=5 # failures in a row, of gcloud or main.py, after which it gives up; the pause doubles each time

train() {
    local failures=0 code
    check_resumable
    check_arguments
    if [[ -n $dry ]]; then
        type=${types[0]:-$type}
        request_slices && install && on_all_hosts start "${arguments[@]}" && on_all_hosts status
        return
    fi
    while true; do
        code=0
        attempt || code=$?
        case $code in
        0) echo "$name: main.py is done; give the slices back: pod.sh delete $name" && return ;;
        2) echo "error: main.py refused its input; see pod.sh logs $name" >&2 && exit 2 ;;
        75) failures=0 && echo "$name: stopped and saved, or preempted: resuming" ;;
        *) failures=$((failures + 1)) && echo "$name: failure $failures of $max_failures (above, and pod.sh logs $name)" ;;
        esac
        [[ $failures -lt $max_failures ]] || { echo "error: $max_failures failures in a row; giving up" >&2 && exit 1; }
        sleep $((failures == 0 ? poll : poll << failures))
    done
}

check_resumable() { # check and complete the arguments, so that the run can resume after the slice's disks are lost
    local words=" ${arguments[*]} "
    [[ $words != *" --resume "* ]] || fail "train resumes automatically; leave --resume out"
    [[ $words == *" checkpoint.dir=gs://"* || $words == *" checkpoint.dir=/"* ]] ||
        fail "train may lose the disks of $name at any time: give checkpoint.dir=gs://BUCKET/... (or a mounted /...)"
    default_cfg
    [[ $words == *" checkpoint.resume="* ]] || arguments+=(checkpoint.resume=if_present)
}

attempt() { # use the slices once: 0 done, 2 input refused, 75 stopped or preempted, 1 failed
    local processes=() count
    ensure_slices || return 1
    if [[ ${#types[@]} -gt 0 ]]; then
        count=$(tpus tpu-vm describe "$(first_node)" --format='value(networkEndpoints.len())') || return "$(failure_code)"
        processes=("mesh.processes=$((count * slices))")
    fi
    install || return "$(failure_code)"
    on_all_hosts start "${arguments[@]}" "${processes[@]}" || return "$(failure_code)"
    watch
}

ensure_slices() { # wait until the slices can be used; request new ones if there are none or they were preempted
    local found next=0 since=$SECONDS
    while true; do
        found=$(state 2>/dev/null) || found=""
        case "$found" in
        READY | ACTIVE) return 0 ;;
        "") request_next || return 1 ;;
        FAILED | SUSPENDED | PREEMPTED | TERMINATED | STOPPED) (delete) || return 1 ;;
        *)
            echo "$name: $found"
            if [[ ${#types[@]} -gt 1 ]] && ((SECONDS - since >= patience)); then
                echo "$name: not given within $patience s: asking for the next type"
                (delete) || return 1
            fi
            ;;
        esac
        sleep "$poll"
    done
}

request_next() { # request slices of the type; with --any of the next of its types, or of those after it if gcloud refuses
    local tried
    [[ ${#types[@]} -gt 0 ]] || { request_slices && return || return 1; }
    for ((tried = 0; tried < ${#types[@]}; tried++)); do
        type=${types[next]} next=$(((next + 1) % ${#types[@]})) since=$SECONDS
        echo "$name: asking for $type"
        request_slices && return
    done
    return 1
}

failure_code() { # print 75 if the slices are gone, else 1
    case "$(state 2>/dev/null)" in READY | ACTIVE) echo 1 ;; *) echo 75 ;; esac
}

watch() { # wait until main.py has ended on all hosts; if it failed on one, stop it on all: they start again together
    local output misses=0 code done_at=""
    while true; do
        sleep "$poll"
        if ! output=$(on_all_hosts status); then
            misses=$((misses + 1)) code=$(failure_code)
            [[ $code == 1 && $misses -lt $max_failures ]] || return "$code"
            continue
        fi
        misses=0
        [[ $output == *ended* || $output == *never* ]] || continue
        code=$(grep -Eo 'ended [0-9]+' <<<"$output" | sort -u)
        if [[ $output == *running* ]]; then
            if [[ $code == "ended 0" ]]; then # done on one host: the others are about to end, too
                done_at=${done_at:-$SECONDS}
                ((SECONDS - done_at >= seconds)) || continue
            fi
            on_all_hosts stop "$seconds" && output=$(on_all_hosts status)
            code=$(grep -Eo 'ended [0-9]+' <<<"$output" | sort -u)
        fi
        echo "$name: $(tr '\n' ' ' <<<"$code")"
        case "$code" in
        "ended 0") return 0 ;;
        *"ended 2"$'\n'* | *"ended 2") return 2 ;;
        "ended 75") return 75 ;;
        *) return 1 ;;
        esac
    done
}
