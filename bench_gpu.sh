#!/usr/bin/env bash
# One GPU in under ten minutes: a step, the presets on cards of 24, 48 and 80 GiB (the allocator is held to that), decoding, TRL.
#
#     pip install -r requirements.txt -r bench-requirements.txt
#     bash bench_gpu.sh OUT              # a folder that does not exist yet, with 9 GB of room for Qwen3-4B of random weights
#     bash bench_gpu.sh OUT --dry-run    # the same commands with tiny-keydoor/, on a CPU
#
# OUT/gpu.json holds all figures, or for a part that failed or took too long, "not_measured" and its last line. What the
# figures are: bench.py, tools/bench_rehearse.py. The random model stays in OUT/model; delete it when done.
set -u
out=${1:+$(realpath -m "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ -z "$out" ] || [ -e "$out" ]; then
    echo "error: pass a new folder: bash bench_gpu.sh OUT" >&2
    exit 2
fi
new=Qwen/Qwen3-4B model=$out/model cards='24 48 80' preset='' small='' patience=1
if [ "${2:-}" = --dry-run ]; then
    new=tiny-keydoor model=tiny-keydoor cards=24 patience=60 preset='--episodes 4 --micro-batch-tokens 160 --context 80'
    small='--rows 2 --group 2 --episodes 2 --tokens 40 --prompt-tokens 20 --new-tokens 3 --observation-tokens 12 --turns 3'
elif ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: no GPU is seen here: --dry-run tries the commands without one" >&2
    exit 2
fi
mkdir -p "$out"

part() {  # NAME SECONDS, options of bench.py
    echo "== $1: python bench.py ${*:3}"
    timeout $(($2 * patience)) python bench.py "${@:3}" --json "$out/$1.json" 2>&1 | tee "$out/$1.log" || echo "$1: not measured"
}
set -o pipefail
part step 140 rehearse --model $new --checkpointing --folder "$model"
for gib in $cards; do
    part preset-$gib $((gib + 36)) rehearse --model "$model" --preset ${gib}gb $preset
done
part limit 60 limit --model "$model" --pairs 1 $small
part trl 120 step --model "$model" --pairs 1 --no-stock $small

python - "$out" <<'EOF'
import json, pathlib, sys
out, parts = pathlib.Path(sys.argv[1]), {}
for log in sorted(out.glob("*.log")):
    file = log.with_suffix(".json")
    last = (log.read_text().strip().splitlines() or ["nothing said: out of time?"])[-1]
    parts[log.stem] = json.loads(file.read_text()) if file.exists() else {"not_measured": last}
(out / "gpu.json").write_text(json.dumps(parts, indent=1))
print(f"{out}/gpu.json: {sum('not_measured' not in part for part in parts.values())} of {len(parts)} parts measured")
sys.exit(any("not_measured" in part for part in parts.values()))
EOF
