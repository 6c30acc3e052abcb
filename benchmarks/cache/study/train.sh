#!/usr/bin/env bash
# Trains the study's models side by side: train.sh FOLDER TOKENS [overrides].
# FOLDER has train.jsonl, the text, and tokenizer/. A third of the tokens are documents of facts that are asked for.
# MODELS="fox hybrid" trains these alone; GPUS=2 puts every second one on another GPU.
set -euf -o pipefail
models=${MODELS:-fox transformer sigma hybrid} gpus=${GPUS:-1} gpu=0
folder=$1 tokens=$2
shift 2
python3 -m benchmarks.cache.study.recall_text --text "$folder/train.jsonl" --output "$folder/recall.jsonl" \
  --bytes $(($(stat -c %s "$folder/train.jsonl") * 3 / 8))
common=(
  model=llama_28m data=text_files tokenizer=pretrained "tokenizer.path=$folder/tokenizer"
  "data.source.path=[$folder/train.jsonl,$folder/recall.jsonl]" "data_dir=$folder/data" data.block_length=8192
  data.sequence_length=8192 data.validation_length=8192 data.validation_fraction=0.004 data.batch_tokens=32768
  data.micro_batch_size=4 "max_tokens=$tokens" log_every_tokens=2097152 "validate_every_tokens=$tokens"
  validation_tokens=524288 checkpoint_every_tokens=8388608 compile=true optimizer.lr=2e-3
  schedule.warmup_tokens=1048576 schedule.final=0.0 model.num_key_heads=null model.num_value_heads=null
  model.max_position_embeddings=8192 model.rope_base=100000.0 model.qk_norm=true model.kv_shift=true
  model.intermediate_size=1024 model.output_gate=true model.output_norm=true callbacks.samples=null
  callbacks.forget_gates=null
)
declare -A own=(
  [fox]="model.rope=false model.forget_gate=data_dependent"
  [transformer]=""
  [sigma]="model.num_key_heads=2 model.num_value_heads=4 model.augmented_query_dim=768"
  [hybrid]="model.mixers=[gla,gla,gla,attention,gla,gla,gla,attention] model.state_dim=64 model.expand_value=1
    model.gate_temperature=16"
)
for name in $models; do
  on=(env)
  [ "$gpus" = 1 ] || on+=("CUDA_VISIBLE_DEVICES=$gpu")
  # shellcheck disable=SC2086  # settings are words
  "${on[@]}" python3 -m palimpsest "${common[@]}" "hydra.run.dir=$folder/runs/$name" ${own[$name]} "$@" \
    >"$folder/$name.log" 2>&1 &
  gpu=$(((gpu + 1) % gpus))
  # The first run prepares the data of all.
  until grep -qs "text:" "$folder/${models%% *}.log" || ! kill -0 $! 2>/dev/null; do sleep 1; done
done
wait
