"""A resident `transformers` process: imports are done, weights are mapped again for each start, then the first forward.

Argument: model directory. A line of token ids on stdin is one start; the answer is the first token.
"""

import gc
import json
import sys

import torch
from transformers import AutoModelForCausalLM

directory = sys.argv[1]
torch.set_num_threads(1)
AutoModelForCausalLM.from_pretrained(directory, dtype="auto")  # do its lazy imports before the measurement
print("ready", flush=True)
for line in sys.stdin:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([json.loads(line)]), logits_to_keep=1).logits
    print(int(logits[0, -1].max(0).indices), flush=True)
    del model, logits
    gc.collect()  # unmaps the weights
