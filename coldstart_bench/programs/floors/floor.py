"""The frozen floor: fork a parent that has imported everything and was given the model, map or read, first forward.

Arguments: model directory, "host" or "nvme". A line of token ids on stdin is one start; its answer is the first token.
At most 60 lines, imports nothing of Kelvin. Whoever changes it writes a design note with both figures.
"""

import ctypes, json, mmap, os, struct, sys, threading
import torch
from transformers import AutoModelForCausalLM

STEP, HUGE, POPULATE_WRITE, COLLAPSE = 8 << 20, 2 << 20, 23, 25
TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
directory, tier = sys.argv[1:3]
torch.set_num_threads(1)
path = os.path.join(directory, "model.safetensors")
size, file = os.path.getsize(path), os.open(path, os.O_RDONLY | os.O_DIRECT)
room, memory, libc = -(-size // HUGE) * HUGE, os.memfd_create("floor"), ctypes.CDLL(None)
os.ftruncate(memory, room)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mapped(protection):  # `memory`, at an address where huge pages can be mapped whole
    hold = libc.mmap(None, room + HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    return libc.mmap(-(-hold // HUGE) * HUGE, room, protection, mmap.MAP_SHARED | 0x10, memory, 0)  # MAP_FIXED


def read(base):  # past the page cache, two threads, straight into huge pages
    def stride(first):
        for at in range(first * STEP, size, 2 * STEP):
            os.preadv(file, [(ctypes.c_char * min(STEP, room - at)).from_address(base + at)], at)

    readers = [threading.Thread(target=stride, args=(n,)) for n in (0, 1)]
    [reader.start() for reader in readers] and [reader.join() for reader in readers]


writable = mapped(mmap.PROT_READ | mmap.PROT_WRITE)
[libc.madvise(writable, room, advice) for advice in (POPULATE_WRITE, COLLAPSE)]
read(writable)
start_of_data = 8 + struct.unpack("<Q", ctypes.string_at(writable, 8))[0]
table = json.loads(ctypes.string_at(writable + 8, start_of_data - 8))
model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval().requires_grad_(False)
slots = [(model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2], e) for n, e in table.items() if n[0] != "_"]
[module._parameters.update({name: None}) for module, name, _ in slots]  # and nothing maps the file any more
print("ready", flush=True)
for line in sys.stdin:
    if os.fork() == 0:
        base = mapped(mmap.PROT_READ) if tier == "host" else writable
        read(base) if tier == "nvme" else None
        for module, name, entry in slots:
            low, high = entry["data_offsets"]
            raw = (ctypes.c_char * (high - low)).from_address(base + start_of_data + low)
            tensor = torch.frombuffer(raw, dtype=TYPES[entry["dtype"]]).view(entry["shape"])
            module._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
        ids = torch.tensor([json.loads(line)])  # the last row by index: a sliced view takes a path 40 times slower
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor([ids.shape[1] - 1])).logits
        print(int(logits[0, -1].max(0).indices), flush=True)
        os._exit(0)
    os.wait()
