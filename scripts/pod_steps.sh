#!/usr/bin/env bash
# The steps of pod.sh, which sources this file: the gcloud commands, and explanations of gcloud's errors.
# Uses the options of pod.sh, its function `fail`, the directory $temporary and the file $gcloud_errors in it.
# shellcheck disable=SC2154,SC2034,SC2088
remote='~/shmap_tp/scripts/on_host.sh' # the host expands the ~
root=$here/..
project=(README.md CONTRIBUTING.md CHANGELOG.md pyproject.toml main.py prepareTPUVM.sh prepareGPUVM.sh
    benchmarks conf docs notebooks scripts shmap_tp tests)

call() { # run a command, or with --dry-run print it; its stderr is shown, and appended to $gcloud_errors
    if [[ -n $dry ]]; then
        printf '%q ' "$@" | sed 's/ $//'
        echo
        return
    fi
    { "$@" 2>&1 >&3 3>&- | tee -a "$gcloud_errors" >&2; } 3>&1
}

explain() { # explain gcloud's error in one line; then exit 1
    local list="gcloud compute tpus tpu-vm list ${location[*]}"
    case "$(<"$gcloud_errors")" in
    *"on_host.sh: No such file"*) echo "error: $name is not set up; run first: pod.sh setup $name" ;;
    *NOT_FOUND* | *"not found"*) echo "error: there is no $name; see $list, or: pod.sh create $name" ;;
    *ALREADY_EXISTS* | *"already exists"*) echo "error: $name exists already; continue with: pod.sh setup $name" ;;
    *"uota"* | *QUOTA*) echo "error: the quota is too small; request more for this type and zone, spot or on-demand:
https://console.cloud.google.com/iam-admin/quotas" ;;
    *"no more capacity"* | *RESOURCE_EXHAUSTED* | *"tockout"*)
        echo "error: no capacity in this zone now; wait with --queued, or try another --zone or --spot"
        ;;
    *PERMISSION_DENIED* | *"not have permission"* | *"has not been used"*)
        echo "error: permission denied; try gcloud auth login, the right --project, and: gcloud services enable tpu.googleapis.com"
        ;;
    *) echo "error: pod.sh $step $name failed (above)" ;;
    esac >&2
    exit 1
}

tpus() { # gcloud compute tpus ARGUMENTS in this zone and project
    call gcloud compute tpus "$@" "${location[@]}"
}

nodes() { # print the name of each slice on a line; gcloud derives those of several from --node-prefix
    if [[ $slices -eq 1 ]]; then
        echo "$name"
    else
        for ((i = 0; i < slices; i++)); do echo "$name-$i"; done
    fi
}

first_node() {
    nodes | head -n 1
}

on_node() { # run on_host.sh with arguments on one worker of a slice, or on all
    local node=$1 worker=$2 command=$remote
    shift 2
    for argument in "$@"; do command+=" $(printf '%q' "$argument")"; done
    [[ $1 != status ]] || command="if [ -x $remote ]; then $command; else echo never started, not set up; fi"
    tpus tpu-vm ssh "$node" --worker="$worker" --command="$command"
}

on_all_hosts() { # run on_host.sh with arguments on all hosts of all slices at once: the devices are tested together
    for_nodes on_node all "$@"
}

for_nodes() { # call FUNCTION NODE ARGUMENTS for all slices at once; fails if one call fails
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

software_version() { # print the VM software for $type, from https://cloud.google.com/tpu/docs/runtimes
    case "$type" in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) return 1 ;;
    esac
}

request_slices() { # request the slices from gcloud
    [[ -n $type ]] || fail "pod.sh $step $name: give --type, such as v4-32"
    local software
    software=${version:-$(software_version)} || fail "--type $type: its software version is not known; give --version, see
https://cloud.google.com/tpu/docs/runtimes"
    local request=(--accelerator-type="$type")
    if [[ -z $queued ]]; then
        request+=(--version="$software" ${tier:+"$tier"} ${network:+--network="$network"})
        tpus tpu-vm create "$name" "${request[@]}"
        return
    fi
    [[ $tier != --preemptible ]] || fail "a queued resource cannot be --preemptible; use --spot"
    if [[ $slices -eq 1 ]]; then request+=(--node-id="$name"); else request+=(--node-count="$slices" --node-prefix="$name"); fi
    request+=(--runtime-version="$software" ${tier:+"$tier"} ${network:+--network="$network"})
    tpus queued-resources create "$name" "${request[@]}"
}

create() {
    if [[ ${#arguments[@]} -gt 0 ]]; then
        default_cfg
        check_arguments
    fi
    request_slices || explain
    [[ -n $dry ]] || echo "next: pod.sh ${queued:+status $name until it is ACTIVE, then pod.sh }setup $name"
}

copy() { # copy the packed working tree to a slice
    tpus tpu-vm scp "$packed" "$1:shmap_tp.tar.gz" --worker=all
}

unpack() { # unpack the copy, or clone, and prepare the hosts of a slice
    local command='mkdir -p ~/shmap_tp && tar -xzf ~/shmap_tp.tar.gz -C ~/shmap_tp && rm ~/shmap_tp.tar.gz'
    if [[ -n $repository ]]; then
        command="if [ -d ~/shmap_tp/.git ]; then git -C ~/shmap_tp pull --ff-only;"
        command+=" else git clone $(printf '%q' "$repository") ~/shmap_tp; fi"
    fi
    tpus tpu-vm ssh "$1" --worker=all --command="$command && $remote prepare"
}

project_files() { # print the files to copy, each followed by a NUL: those that git tracks, changed or not
    if git -C "$root" ls-files --error-unmatch main.py >/dev/null 2>&1; then
        comm -z -23 <(git -C "$root" ls-files -z | sort -zu) <(git -C "$root" ls-files -z --deleted | sort -zu)
    else # an unpacked archive: files, no links, of the project's own directories, and nothing hidden
        (cd "$root" && find "${project[@]}" -name '.?*' -prune -o -name __pycache__ -prune -o -type f -print0)
    fi
}

untracked_files() { # print the files that git neither tracks nor ignores, which are therefore not copied
    git -C "$root" ls-files --others --exclude-standard 2>/dev/null || true
}

pack() { # write the files of this working tree to $packed
    local untracked
    project_files >"$temporary/files"
    untracked=$(untracked_files)
    if [[ -n $untracked ]]; then
        echo "not copied, because git does not track them (git add what main.py needs): $(head -n 5 <<<"$untracked" | paste -sd ' ')"
    fi
    tar -C "$root" --null -czf "$packed" -T "$temporary/files"
}

install() { # copy the packed working tree to all slices, or clone it there, and prepare their hosts
    if [[ -z $repository ]]; then
        packed=$temporary/shmap_tp.tar.gz
        [[ -n $dry ]] || pack || return
        for_nodes copy || return
        rm -f "$packed"
    fi
    for_nodes unpack
}

setup() {
    install || explain
    [[ -n $dry ]] || echo "next: pod.sh run $name -- --cfg conf/recipes/NAME.yaml checkpoint.dir=gs://BUCKET/..."
}

check_cfg() { # fail if the file of --cfg is not among those that setup copies
    local i file=""
    for ((i = 0; i < ${#arguments[@]}; i++)); do
        case ${arguments[i]} in --cfg) file=${arguments[i + 1]:-} ;; --cfg=*) file=${arguments[i]#--cfg=} ;; esac
    done
    [[ ! -e $root/$file || $(project_files | grep -czxF -- "${file#./}") -gt 0 ]] ||
        fail "--cfg $file is not copied to the hosts, which get the files that git tracks: git add $file"
}

check_arguments() { # check the run here, by the --check of main.py, before it costs money; the summary goes to stderr
    [[ -z $unchecked ]] || return 0
    [[ -n $repository ]] || check_cfg
    local python each
    for python in "$root/.venv/bin/python" python3 python; do
        if (cd "$root" && "$python" -c 'import shmap_tp.train, hydra, jax, equinox') >/dev/null 2>&1; then
            for each in "${types[@]:-$type}"; do check_type "$each" || exit; done
            return
        fi
    done
    fail "no Python here has the packages that check the run before it costs money: pip install -e '.[gcs]';
or add --unchecked, and main.py checks it on the hosts"
}

check_type() ( # check the arguments of main.py for slices of type $1, or of none; with --any they get its hosts
    slice=() processes=()
    [[ -z $1 ]] || slice=(--type "$([[ $slices -eq 1 ]] || echo "${slices}x")$1")
    cd "$root" || exit
    if [[ ${#types[@]} -gt 0 ]]; then
        hosts='import sys; from shmap_tp.hardware.devices import find_slices; print(find_slices(sys.argv[1]).hosts)'
        processes=("mesh.processes=$("$python" -c "$hosts" "${slice[1]}")")
    fi
    JAX_PLATFORMS=cpu "$python" main.py --check "${slice[@]}" "${arguments[@]}" "${processes[@]}" >&2
)

default_cfg() { # add --cfg to the arguments of main.py, if they name none
    [[ " ${arguments[*]} " == *" --cfg "* ]] || arguments=(--cfg conf/base.yaml "${arguments[@]}")
}

run() {
    default_cfg
    [[ -z $dry ]] || check_arguments
    on_all_hosts start "${arguments[@]}" || explain
    [[ -n $dry ]] || echo "next: pod.sh logs $name --follow"
}

state() { # print the state of the slices together: READY or ACTIVE when they can be used
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
    if [[ -n $dry ]]; then echo "$found"; else echo "$name: $found (below: each slice, its state, its number of hosts)"; fi
    [[ -n $dry || $found == READY || $found == ACTIVE ]] || return 0
    for_nodes hosts || explain
    on_all_hosts status || explain
}

delete() {
    if [[ -n $queued ]]; then
        tpus queued-resources delete "$name" --force --quiet || explain
    else
        tpus tpu-vm delete "$name" --quiet || explain
    fi
}
