#!/usr/bin/env bash
# From text to a model that talks, in five parts: prepare, pretrain, tune on conversations, talk, evaluate.
#
#   scripts/speedrun.sh                                     the smallest size: two CPU cores, no download
#   scripts/speedrun.sh conf/recipes/gpt2_124m_v5e-8.yaml   GPT-2 124M, on the devices of the recipe
#
# Further arguments are key=value for pretraining, TUNE has some for tuning, and CHAT files of conversations of your own
# (docs/finetuning.md).  A part that is done is not repeated, and a run that was stopped continues: start the script
# again.  docs/speedrun.md has times, prices and losses.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ${1:-} == *.yaml ]]; then
    recipe=$1 name=$(basename "$1" .yaml) rows=1024 tokenizer=gpt2 data=data/openwebtext
    shift
    pretrain=("$@")
    tune=(train.steps=300 train.batch=32 mesh.dp=auto mesh.mp=1 optimizer.learning_rate=1e-4)
else
    recipe=conf/base.yaml name=speedrun rows=256 tokenizer=bytes data=
    pretrain=(model=bytes_llama data=stdlib "model.context=$rows" train.batch=16 train.steps=150 mesh.dp=1 mesh.mp=2 "$@")
    tune=(train.steps=150 train.batch=8 mesh.dp=1 mesh.mp=2 optimizer.learning_rate=2e-3)
fi
read -ra more <<< "${TUNE:-}"
tune+=("${more[@]}")
base=runs/$name tuned=runs/${name}_chat chat=data/${name}_chat
conversations=(--source conversations)
[[ -z ${CHAT:-} ]] || read -ra conversations <<< "--chat $CHAT"

train() { python main.py "$@" checkpoint.resume=if_present; }
part() { printf '\n== %s\n' "$*"; }

part "1. prepare: text (unless the run prepares its own), and conversations in rows of $rows tokens"
mkdir -p runs
cat > "$base.jinja" << 'TEMPLATE'
{% for m in messages %}{{ m.role[0] }}:{{ m.content }}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}
TEMPLATE
[[ -z $data || -e $data ]] || python -m shmap_tp.prepare --dataset Skylion007/openwebtext --tokenizer "$tokenizer" \
    --validation 0.001 --out "$data"
[[ -e $chat ]] || python -m shmap_tp.prepare "${conversations[@]}" --tokenizer "$tokenizer" \
    --template "$base.jinja" --pack "$rows" --validation 0.1 --out "$chat"

part "2. pretrain: $recipe ${pretrain[*]}"
train --cfg "$recipe" "run.dir=$base" "${pretrain[@]}"
[[ -e ${base}_hf ]] || python -m shmap_tp.pretrained export "$base" --out "${base}_hf"

part "3. tune on conversations: ${tune[*]}"
train --cfg conf/finetune.yaml "model.from_pretrained=${base}_hf" "data.dir=$chat" "run.dir=$tuned" \
    "model.context=$rows" "${tune[@]}" 'sample.prompts=["What is the capital of Peru?"]' sample.max_new_tokens=64

part "4. talk (python -m shmap_tp.chat --checkpoint $tuned)"
printf 'What is the capital of Peru?\nWhat is the opposite of hot?\n' |
    python -m shmap_tp.chat --checkpoint "$tuned" --max-new-tokens 64 --temperature 0

part "5. evaluate: bits per byte of the text, and of the answers"
python -m shmap_tp.evaluate --checkpoint "$base"
python -m shmap_tp.evaluate --checkpoint "$tuned"
python -m shmap_tp.report "$base" "$tuned" --out "$base.html"
