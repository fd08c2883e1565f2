"""Print the checksum that every loader must reach, computed by plain reads of a safetensors file. Argument: the
file.
"""

import json
import struct
import sys
from pathlib import Path

import torch

from coldstart_bench.programs import load_server

with Path(sys.argv[1]).open("rb") as file:
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            file.seek(8 + length + low)
            raw = bytearray(high - low)
            file.readinto(raw)
            total += load_server.consume({name: torch.frombuffer(raw, dtype=torch.uint8)})
print(total % 2**64)
