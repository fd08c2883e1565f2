"""The rival that a user would write: a new process, `from_pretrained`, first forward. Arguments: model directory, token
ids.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

directory, ids = sys.argv[1:3]
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
with torch.no_grad():
    logits = model(input_ids=torch.tensor([json.loads(ids)]), logits_to_keep=1).logits
print(int(logits[0, -1].max(0).indices), flush=True)
