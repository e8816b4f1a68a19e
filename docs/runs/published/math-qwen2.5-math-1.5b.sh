# MATH, Qwen2.5-Math-1.5B (base), GRPO: 3.0% -> 69.5% after 100 steps, 73.4% after 160, one H100, 10
# minutes for 20 steps. Source: github.com/garg-aayush/building-from-scratch, folder grpo/.
# Nobody has run this command yet. The source has bfloat16 weights and AdamW's betas 0.9 and 0.95.
# Here the weights are float32, and the betas 0.9 and 0.999.
# It downloads a model and a data set (pip install datasets). The prompt is no chat, so the chat
# template is removed from a copy of the model.

python - <<'END'
import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer

rows = datasets.load_dataset("qwedsacf/competition_math", split="train")
rows = rows.rename_columns({"problem": "prompt", "solution": "answer"})
for name, part in rows.train_test_split(1024, seed=0).items():
    part.to_json(f"math-{name}.jsonl")

AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-Math-1.5B").save_pretrained("math-1.5b")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-Math-1.5B")
tokenizer.chat_template = None
tokenizer.save_pretrained("math-1.5b")
END

R1_ZERO='A conversation between User and Assistant. The User asks a question, and the Assistant solves
it. The Assistant first thinks about the reasoning process in the mind and then provides the User
with the answer. The reasoning process is enclosed within <think> </think> and answer is enclosed
within <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> <answer>
answer here </answer>.'

python train.py --name math --algo grpo --kl-coef 0 --clip-low 0.2 --clip-high 0.2 \
  --model ./math-1.5b --reward math \
  --data math-train.jsonl --eval-data math-test.jsonl --eval-prompts 1024 \
  --prompt-template "${R1_ZERO//$'\n'/ }\nUser: {prompt}\nAssistant: <think>" --stop '</answer>' \
  --prompts-per-step 32 --group-size 8 --completions-per-update 256 --max-new-tokens 1024 \
  --steps 160 --lr 3e-5 --lr-schedule constant --warmup-steps 0 --eval-every 20 --eval-samples 0

# your run over the published points
python train.py --report runs/math docs/runs/published/math-qwen2.5-math-1.5b.csv
