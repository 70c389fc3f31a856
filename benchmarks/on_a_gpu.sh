#!/usr/bin/env bash
# What is measured on a GPU, part by part, within a time limit:
#
#     benchmarks/on_a_gpu.sh OUT COMMIT SECONDS PART...
#
# Records, logs and the lab's runs come under OUT. A part that the time does not reach is left out and said to be; what runs
# when it is over is ended, with its records so far in place. DRY=1 prints the commands instead.
#
# tests       the GPU tests
# seeds       the lab's runs that need no speeds, beside each other: seeds, other compile budgets
# moments     perplexities on the way, of three arithmetics beside each other
# short       3.14B at 4 x 2048
# long        3.14B at 32 x 2048
# shares      shares of the host and static partitions, of 8B and 3.14B
# scale       13B, 20B and 40B
# deepspeed   how far it goes with a part of its optimizer on the device (its wheels must be installed)
# policies    the activation policies and the table on the host
# speeds      the lab's runs of 100 steps, one at a time
# curve       streamed in budgets of 1, 2 and 3 GiB; 0.6 is among the speeds
# compiled    what is alive at the peak of compiled recipes
# checkpoints saves while training goes on, and loading, of 3.14B and 1B; the disk needs 40 GiB
# repeats     whether a layer's backward gives the same bits each time, alone and beside others
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=$1 commit=$2 limit_s=$3
shift 3
export LOWTIDE_COMMIT=$commit PYTHONUNBUFFERED=1 PYTHONPATH=src:. PYTHON=${PYTHON:-python3}
began_s=$SECONDS
mkdir -p "$out"

left_s() { echo $((limit_s - (SECONDS - began_s))); }

# Within what is left of the time: `within NAME COMMAND...`, its output in NAME.log.
within() {
  local name=$1
  shift
  if [ -n "${DRY:-}" ]; then
    echo "$name: $*"
  elif [ "$(left_s)" -lt 15 ]; then
    echo "$name: left out, the time is over"
  else
    timeout --kill-after=10 "$(left_s)" "$@" >"$out/$name.log" 2>&1
    echo "$name: exit code $?, $(left_s) s left"
  fi
}

lab() { # NAME WORDS...
  local name=$1
  shift
  within "lab_$name" "$PYTHON" -m lowtide.cli.main lab run "$@" --out "$out/lab_$name"
}

suite() { # NAME MODULE SUITE WORDS...
  local name=$1 module=$2
  shift 2
  within "$name" "$PYTHON" -m "benchmarks.$module" "$@" --out "$out/$name" --commit "$commit"
}

# What the lab's recipes train on; seconds.
within stories "$PYTHON" -m benchmarks.stories

memory=(--shared --set steps=3 --set evaluation=null --set data.kind=random-inputs)
published=peak_memory

tests() {
  # pytest-benchmark, where it is installed, has no place in tests that run beside each other.
  within tests "$PYTHON" -m pytest -q -n 10 -m gpu -p no:cacheprovider -p no:benchmark tests
  [ -n "${DRY:-}" ] || tail -n 12 "$out/tests.log"
}

seeds() {
  for seed in 42 43 44; do
    lab "exact_$seed" $published/bf16_exact --seeds $seed, --shared &
  done
  lab streamed $published/streamed --seeds 44, --shared &
  {
    lab budget_06 $published/bf16_budget_60 "${memory[@]}" --set compile.activation_budget=0.06
    lab budget_05 $published/bf16_budget_60 "${memory[@]}" --set compile.activation_budget=0.05
  } &
  wait
}

moments() {
  local words=(--seeds 43, --shared --set steps=110 --set evaluation.samples=64 --set "evaluation.after=[85, 90, 95, 100, 105]")
  for name in control bf16_stochastic bf16_exact; do
    lab "moments_$name" $published/$name "${words[@]}" &
  done
  wait
}

short() {
  suite short session.run optimizer_short
}

shares() {
  suite share_8b session.run host_share_8b
  suite share_3b session.run host_share_3b
  suite partition_8b session.run partition_8b
  suite partition_3b session.run partition_3b
}

scale() {
  suite scale session.run scale
}

long() {
  suite long session.run optimizer_long
}

deepspeed() {
  suite deepspeed optim.run largest --timeout 240
}

policies() {
  suite policies activations.run policies --match "each layer" --match selective --match recompute
  suite policies_long activations.run policies_long --match "each layer" --match selective --match recompute
  suite embedding activations.run embedding
}

speeds() {
  lab speeds $published/{bf16_stochastic,compile_per_layer_bf16} $published/bf16_fused_checkpoint $published/streamed $published/control --seeds 42,
}

curve() {
  lab curve $published/streamed_{1,2,3}gib --set steps=30 --set evaluation=null
}

compiled() {
  within peak_60 "$PYTHON" -m benchmarks.compiled.peak $published/memory_budget_60 --out "$out/peaks" --commit "$commit"
  within peak_bf16 "$PYTHON" -m benchmarks.compiled.peak $published/bf16_budget_60 --out "$out/peaks" --commit "$commit"
}

checkpoints() {
  suite checkpoints session.checkpoints saves --timeout 500 --match 3.14B
}

repeats() {
  within repeats "$PYTHON" -m benchmarks.lab.repeats --out "$out/repeats" --commit "$commit"
}

for part in "$@"; do
  case $part in
    tests | seeds | moments | short | long | shares | scale | deepspeed | policies | speeds | curve | compiled | checkpoints | repeats) "$part" ;;
    *) echo "there is no part $part" >&2 && exit 2 ;;
  esac
done
