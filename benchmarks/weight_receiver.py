"""A stand-in for a server in benchmarks/weight_sync.py: SGLang's weight endpoints over HTTP, a state dict behind them.

It does what SGLang's code does with what arrives and no more: copies every tensor into its own of that name. `/zero`
forgets all weights, `/digest` says what it holds.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.reductions
import xxhash
from driver import Commands
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.parameters import hf_tensors


class Model:
    """Weights under Hugging Face names, and what the endpoints do to them."""

    def __init__(self, folder: Path) -> None:
        hf = read_hf_config(folder)
        self.weights = {
            name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in hf_tensors(hf, head="lm").items()
        }
        self.groups: dict[str, Any] = {}
        self.requests = 0

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/digest":
            return {"digest": digest(self.weights), "requests": self.requests}
        if path == "/zero":
            self.requests = 0
            for weight in self.weights.values():
                weight.zero_()
            return {"success": True}
        self.requests += 1
        getattr(self, path.strip("/"))(body)
        return {"success": True, "message": ""}

    def update_weights_from_tensor(self, body: dict[str, Any]) -> None:
        content = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        if body["load_format"] is None:
            tensors = content
        else:
            flat = content["flattened_tensor"]
            tensors = [
                (meta.name, flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape))
                for meta in content["metadata"]
            ]
        for name, tensor in tensors:
            self.weights[name].copy_(tensor)

    def init_weights_update_group(self, body: dict[str, Any]) -> None:
        name, size, timeout = body["group_name"], body["world_size"], timedelta(seconds=60)
        store = TCPStore(body["master_address"], body["master_port"], size, is_master=False, timeout=timeout)
        named = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self.groups[name] = dist.ProcessGroupGloo(named, body["rank_offset"], size, timeout)

    def destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        del self.groups[body["group_name"]]

    def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        kinds = [getattr(torch, name) for name in body["dtypes"]]
        shapes = [torch.Size(shape) for shape in body["shapes"]]
        sizes = [shape.numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.groups[body["group_name"]].broadcast([flat], options).wait()
        for name, kind, shape, part in zip(body["names"], kinds, shapes, flat.split(sizes), strict=True):
            self.weights[name].copy_(part.view(kind).reshape(shape))


def digest(weights: dict[str, torch.Tensor]) -> str:
    """One hash of all names and bytes."""
    total = xxhash.xxh3_64()
    for name in sorted(weights):
        total.update(name.encode())
        total.update(weights[name].view(torch.uint8).numpy().data)
    return total.hexdigest()


def main(folder: Path, pipes: Path) -> None:
    """Tell its port and serve until it is killed."""
    torch.set_num_threads(1)
    model = Model(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            data = json.dumps(model.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.disable_nagle_algorithm = True
    Commands(pipes).answer({"port": server.server_address[1]})
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
