#!/usr/bin/env bash
# The steps of pod.sh, which sources this: what it asks of gcloud, and how it explains what gcloud refuses.
# Uses its options, `fail`, and `heard`, a file.
# shellcheck disable=SC2154,SC2034,SC2088
remote='~/shmap_tp/scripts/on_host.sh' # the host expands the ~

call() { # run a command, or with --dry-run print it; what it writes on stderr is seen, and kept in $heard
    if [[ -n $dry ]]; then
        printf '%q ' "$@" | sed 's/ $//'
        echo
        return
    fi
    { "$@" 2>&1 >&3 3>&- | tee -a "$heard" >&2; } 3>&1
}

explain() { # what gcloud refused, in a line; then exit 1
    local list="gcloud compute tpus tpu-vm list ${place[*]}"
    case "$(<"$heard")" in
    *NOT_FOUND* | *"not found"*) echo "error: there is no $name here; see $list, or: pod.sh create $name" ;;
    *ALREADY_EXISTS* | *"already exists"*) echo "error: $name is there already; go on with: pod.sh setup $name" ;;
    *"uota"* | *QUOTA*) echo "error: the quota is too small; ask for more of this type, in this zone, spot or not:
https://console.cloud.google.com/iam-admin/quotas" ;;
    *"no more capacity"* | *RESOURCE_EXHAUSTED* | *"tockout"*)
        echo "error: this zone has none to spare now; wait for one with --queued, or try another --zone or --spot"
        ;;
    *PERMISSION_DENIED* | *"not have permission"* | *"has not been used"*)
        echo "error: not allowed: gcloud auth login, the right --project, and: gcloud services enable tpu.googleapis.com"
        ;;
    *) echo "error: pod.sh $step $name failed (above)" ;;
    esac >&2
    exit 1
}

tpus() { # gcloud compute tpus ARGUMENTS in this place
    call gcloud compute tpus "$@" "${place[@]}"
}

nodes() { # a slice's name each, in a line: of several, what gcloud makes of --node-prefix
    if [[ $slices -eq 1 ]]; then
        echo "$name"
    else
        for ((i = 0; i < slices; i++)); do echo "$name-$i"; done
    fi
}

first_node() {
    nodes | head -n 1
}

on_node() { # on_host.sh with arguments on a slice's worker (or all)
    local node=$1 worker=$2 command=$remote
    shift 2
    for argument in "$@"; do command+=" $(printf '%q' "$argument")"; done
    tpus tpu-vm ssh "$node" --worker="$worker" --command="$command"
}

everywhere() { # on_host.sh with arguments on all hosts of all slices at once: the devices are tested together
    for_nodes on_node all "$@"
}

for_nodes() { # FUNCTION NODE ARGUMENTS for all slices at once; fails where one of them does
    local function=$1 code=0 node jobs=()
    shift
    if [[ $slices -eq 1 || -n $dry ]]; then
        for node in $(nodes); do "$function" "$node" "$@" || return; done
        return
    fi
    for node in $(nodes); do
        "$function" "$node" "$@" &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job" || code=$?; done
    return "$code"
}

software() { # the VM's software for a type, by https://cloud.google.com/tpu/docs/runtimes
    case "$type" in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) return 1 ;;
    esac
}

order() { # ask for the slices
    [[ -n $type ]] || fail "pod.sh $step $name: give --type, such as v4-32"
    version=${version:-$(software)} || fail "--type $type: its software is not known here; give --version, see
https://cloud.google.com/tpu/docs/runtimes"
    local wanted=(--accelerator-type="$type")
    if [[ -z $queued ]]; then
        wanted+=(--version="$version" ${tier:+"$tier"} ${network:+--network="$network"})
        tpus tpu-vm create "$name" "${wanted[@]}"
        return
    fi
    [[ $tier != --preemptible ]] || fail "what is queued cannot be --preemptible; use --spot"
    if [[ $slices -eq 1 ]]; then wanted+=(--node-id="$name"); else wanted+=(--node-count="$slices" --node-prefix="$name"); fi
    wanted+=(--runtime-version="$version" ${tier:+"$tier"} ${network:+--network="$network"})
    tpus queued-resources create "$name" "${wanted[@]}"
}

create() {
    order || explain
    [[ -n $dry ]] || echo "next: pod.sh ${queued:+status $name until it is ACTIVE, then pod.sh }setup $name"
}

copy() { # what git knows of here, changed or not, to a slice
    tpus tpu-vm scp "$packed" "$1:shmap_tp.tar.gz" --worker=all
}

unpack() {
    local command='mkdir -p ~/shmap_tp && tar -xzf ~/shmap_tp.tar.gz -C ~/shmap_tp'
    if [[ -n $repository ]]; then
        command="if [ -d ~/shmap_tp/.git ]; then git -C ~/shmap_tp pull --ff-only;"
        command+=" else git clone $(printf '%q' "$repository") ~/shmap_tp; fi"
    fi
    tpus tpu-vm ssh "$1" --worker=all --command="$command && $remote prepare"
}

install() {
    if [[ -z $repository ]]; then
        packed=${TMPDIR:-/tmp}/shmap_tp-$name.tar.gz
        if [[ -z $dry ]]; then
            git -C "$here/.." ls-files -z --cached --others --exclude-standard --deduplicate |
                tar -C "$here/.." --null --ignore-failed-read -czf "$packed" -T -
        fi
        for_nodes copy || return
    fi
    for_nodes unpack
}

setup() {
    install || explain
    [[ -n $dry ]] || echo "next: pod.sh run $name -- model=... mesh.dp=... mesh.mp=... mesh.processes=HOSTS"
}

run() {
    [[ " ${arguments[*]} " == *" --cfg "* ]] || arguments=(--cfg conf/config.yaml "${arguments[@]}")
    everywhere start "${arguments[@]}" || explain
    [[ -n $dry ]] || echo "next: pod.sh logs $name --follow"
}

state() { # of the slices together: READY or ACTIVE when they may be used
    if [[ -n $queued ]]; then
        tpus queued-resources describe "$name" --format='value(state.state)'
    else
        tpus tpu-vm describe "$name" --format='value(state)'
    fi
}

hosts() {
    tpus tpu-vm describe "$1" --format='value(name.basename(),state,networkEndpoints.len())'
}

show_status() {
    local found
    found=$(state) || explain
    if [[ -n $dry ]]; then echo "$found"; else echo "$name: $found (then each slice, its state, its hosts)"; fi
    [[ -n $dry || $found == READY || $found == ACTIVE ]] || return 0
    for_nodes hosts || explain
    everywhere status || explain
}

delete() {
    if [[ -n $queued ]]; then
        tpus queued-resources delete "$name" --force --quiet || explain
    else
        tpus tpu-vm delete "$name" --quiet || explain
    fi
}
