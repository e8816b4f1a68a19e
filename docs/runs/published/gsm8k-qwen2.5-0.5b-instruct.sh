# GSM8K, Qwen2.5-0.5B-Instruct, GRPO: 43.6% -> 50.2% after 100 steps, one GB10, 1 h 11 min.
# Source: slime issue 1835, comment of 2026-04-16. Nobody has run this command yet.
# Chosen here, because the source does not say: one update a step, 1,024 new tokens, no KL, the
# wording of the prompt. It downloads a model and a data set (pip install datasets).

python - <<'END'
import datasets

for name, rows in datasets.load_dataset("openai/gsm8k", "main").items():
    rows.to_json(f"gsm8k-{name}.jsonl")
END

python train.py --name gsm8k --algo grpo --kl-coef 0 --clip-low 0.2 --clip-high 0.28 \
  --model Qwen/Qwen2.5-0.5B-Instruct --reward math \
  --data gsm8k-train.jsonl --eval-data gsm8k-test.jsonl --eval-prompts 1319 \
  --prompt-template '{prompt}\nThink step by step, and write the final answer within \boxed{}.' \
  --prompts-per-step 20 --group-size 8 --completions-per-update 160 --max-new-tokens 1024 \
  --steps 100 --lr 1e-6 --lr-schedule constant --warmup-steps 0 --eval-every 20 --eval-samples 0

# your run over the published points
python train.py --report runs/gsm8k docs/runs/published/gsm8k-qwen2.5-0.5b-instruct.csv
