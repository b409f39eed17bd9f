#!/usr/bin/env python3
"""Times other implementations of the routed MoE layer beside `hexpert bench --backend cuda-sm90a`, by its method.

    peers.py --json peers.json
    peers.py --models qwen3-30b-a3b --tokens 1,32 --peers humming --max-seconds 60

A cell is a model, a number of tokens and a peer: one CUDA graph of several calls with their own routes and copies of
the weights, so that no call finds its data in the L2 cache; the median of the replays, for one call. Up to four tokens
of every cell are compared with the layer in float64; a cell that is off, or fails, is reported and not timed. Cells run
in a process of their own, which is started again after a crash or a hang.

Needs PyTorch with CUDA and Triton; the peer `humming` also needs the package humming-kernels and the CUDA toolkit.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback

PEERS = ("humming", "triton", "torch")
FIRST_MODELS = ("qwen3-30b-a3b", "nemotron-3-nano")
ALL_MODELS = (*FIRST_MODELS, "mixtral-8x7b", "deepseek-v3")
FIRST_TOKENS = (1, 32, 512, 2048)
ALL_TOKENS = (1, 8, 32, 128, 512, 2048, 8192)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(ALL_MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, ALL_TOKENS)))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--routing", default="uniform", choices=("uniform", "zipf"))
    parser.add_argument("--max-seconds", type=float, default=600, help="no cell starts later than this")
    parser.add_argument("--cell-seconds", type=float, default=0.5, help="of replays")
    parser.add_argument("--hang-seconds", type=float, default=90, help="a cell that takes longer is given up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="rewritten after every cell")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu, with TRITON_INTERPRET=1: tests")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warm", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def cells_of(args):
    """Model, tokens and peer, the ones that matter most first."""
    models = args.models.split(",")
    tokens = [int(t) for t in args.tokens.split(",")]
    pairs = [(m, t) for m in models for t in tokens]

    def order(pair):
        model, count = pair
        first = model in FIRST_MODELS and count in FIRST_TOKENS
        return (0 if first else 1 if model in FIRST_MODELS else 2), models.index(model), tokens.index(count)

    return [(m, t, p) for m, t in sorted(pairs, key=order) for p in args.peers.split(",")]


# ---- in the process that computes


class Worker:
    def __init__(self, args):
        self.args = args
        self.weights = {}
        self.layers = {}

    def layer(self, model, peer):
        from layers import PEERS as classes

        weights_class, layer_class = classes[peer]
        if (model.name, weights_class) not in self.weights:
            self.weights[model.name, weights_class] = weights_class(model, self.args.device, self.args.seed)
        if (model.name, peer) not in self.layers:
            weights = self.weights[model.name, weights_class]
            self.layers[model.name, peer] = layer_class(model, weights, self.args.device)
        return self.layers[model.name, peer]

    def prepare(self, cells):
        """Makes the weights and compiles what can be compiled ahead."""
        from problem import MODELS

        notes = []
        for model in dict.fromkeys(m for m, _, _ in cells):
            for peer in dict.fromkeys(p for m, _, p in cells if m == model):
                start = time.perf_counter()
                try:
                    layer = self.layer(MODELS[model], peer)
                    note = ""
                    if hasattr(layer, "compile"):
                        count, failed = layer.compile([t for m, t, p in cells if (m, p) == (model, peer)])
                        note = f", {count} kernels, {failed} not to be had"
                    notes.append(f"{model} {peer}: {time.perf_counter() - start:.1f} s{note}")
                except Exception as error:  # the cells report it
                    notes.append(f"{model} {peer}: {describe(error)}")
        return notes

    def run(self, name, tokens, peer):
        import torch
        from problem import MODELS, TOLERANCE, Graph, element_type, random_calls, relative_error

        args = self.args
        model = MODELS[name]
        layer = self.layer(model, peer)
        weights = layer.weights
        copies = len(weights.copies)
        calls = random_calls(
            model, args.routing, tokens, copies, weights.bits_per_weight, args.seed + 1000, args.device
        )
        out = torch.empty(tokens, model.hidden_size, dtype=element_type(args.device), device=args.device)
        rows = []
        for variant, forward in layer.variants(tokens, calls).items():
            row = {
                "model": name,
                "tokens": tokens,
                "peer": peer,
                "variant": variant,
                "choice": getattr(layer, "choice", ""),
                "routing": args.routing,
                "calls": len(calls),
            }
            rows.append(row)
            try:
                out.fill_(float("nan"))
                forward(0, calls[0], out)
                row["error"] = relative_error(model, calls[0], out, lambda e: weights.expert(0, e))
                if not row["error"] < TOLERANCE:
                    raise ArithmeticError(f"relative error {row['error']:.3g}")

                def enqueue(forward=forward):
                    for i, call in reversed(list(enumerate(calls))):
                        forward(i % copies, call, out)

                graph = Graph(enqueue, args.device)
                median, p90, samples = graph.median(args.cell_seconds)
                # What the last replay left, of call 0.
                row["error"] = relative_error(model, calls[0], out, lambda e: weights.expert(0, e))
                if not row["error"] < TOLERANCE:
                    raise ArithmeticError(f"relative error {row['error']:.3g} after replays")
                row.update(us=median / len(calls) * 1e6, p90_us=p90 / len(calls) * 1e6, samples=samples)
                del graph
            except Exception as error:
                row["failure"] = describe(error)
                if fatal(error):
                    break
        return rows


def describe(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def fatal(error):
    """After an error of the device nothing works any more in its process."""
    return "CUDA error" in str(error) or "CUDA_ERROR" in str(error)


def worker(args):
    """Reads cells from stdin, a JSON list a line, and answers each with a line of rows."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to stderr
    state = Worker(args)
    for line in sys.stdin:
        message = json.loads(line)
        answer = {}
        try:
            if "prepare" in message:
                answer["notes"] = state.prepare([tuple(cell) for cell in message["prepare"]])
            else:
                answer["rows"] = state.run(*message["cell"])
        except Exception as error:
            traceback.print_exc()
            answer["failure"] = describe(error)
            answer["fatal"] = fatal(error)
        failures = [row["failure"] for row in answer.get("rows", []) if "failure" in row]
        answer["fatal"] = answer.get("fatal", False) or any(map(fatal, failures))
        reply.write(json.dumps(answer) + "\n")
        reply.flush()
        if answer["fatal"]:
            os._exit(3)
        if args.device == "cuda" and "rows" in answer:
            import torch

            torch.cuda.empty_cache()


def warm(args):
    """Compiles a share, "i/n", of the Triton kernels that the cells use, into Triton's cache."""
    import kernels
    import torch
    from problem import MODELS

    share, shares = map(int, args.warm.split("/"))
    kernels.warming = True
    jobs = {}
    for name, tokens, peer in cells_of(args):
        if peer == "torch":
            continue
        model = MODELS[name]
        routes = tokens * model.top_k

        def new(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="meta")

        ids = new(tokens, model.top_k, dtype=torch.int32)
        probabilities = new(tokens, model.top_k, dtype=torch.float32)
        fc1 = new(model.num_experts, model.fc1_rows, model.hidden_size)
        fc2 = new(model.num_experts, model.hidden_size, model.intermediate_size)
        x, h = new(tokens, model.hidden_size), new(routes, model.fc1_rows)
        a, y, g = new(routes, model.intermediate_size), new(routes, model.hidden_size), new(routes, model.hidden_size)
        size = min(2, (routes > 64) + (routes > 256)) if routes <= kernels.SMALL_ROUTES else 3

        def align(rows, routes=routes, model=model, ids=ids):
            plan = kernels.Alignment(routes, model.num_experts, rows, "meta")
            jobs.setdefault(("align", plan.bins, size, rows > 1), lambda: plan.run(ids))
            return plan

        jobs.setdefault(("act", model.gated), lambda h=h, a=a, model=model: kernels.activate(h, a, model.gated))
        if peer == "triton":
            jobs.setdefault(("sum", model.top_k), lambda y=y, x=x: kernels.combine(y, None, None, x))
            for rows, tiles in kernels.tiles_for(routes / model.num_experts).items():
                plan = align(rows)
                for tile in tiles:
                    gemms = ((x, fc1, h, model.top_k, None), (a, fc2, y, 1, probabilities))
                    for inputs, weights, outputs, k, p in gemms:
                        key = ("gemm", tile, p is None, weights.shape[2] % tile.depth == 0)
                        job = (inputs, weights, outputs, plan, k, p, tile)
                        jobs.setdefault(key, lambda job=job: kernels.gemm(*job))
        if peer == "humming":
            plan = align(1)
            align(8)
            positions = new(routes, dtype=torch.int32)
            gather = (x, plan.sorted_ids, model.top_k, g)
            jobs.setdefault("gather", lambda job=gather: kernels.gather(*job))
            for at in (None, positions):
                job = (y, probabilities, at, x)
                jobs.setdefault(("sum", model.top_k, at is None, True), lambda job=job: kernels.combine(*job))
    mine = [job for i, job in enumerate(jobs.values()) if i % shares == share]
    for job in mine:
        try:
            job()
        except Exception as error:  # the cell reports it
            print(f"warm: {describe(error)}", file=sys.stderr)


# ---- in the process that was started


class Child:
    """A worker and its answers."""

    def __init__(self, argv):
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), *argv, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, message, seconds):
        """The answer, or what went wrong."""
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            return {"failure": f"no answer within {seconds:.0f} s", "fatal": True}
        except OSError:
            line = None
        if line is None:
            return {"failure": f"the process ended with {self.process.wait()}", "fatal": True}
        return json.loads(line)

    def close(self):
        try:
            self.process.stdin.close()
            self.process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            pass
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def versions():
    from importlib import metadata

    found = {}
    for package in ("torch", "triton", "humming-kernels"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def main(argv):
    args = parse(argv)
    if args.worker:
        return worker(args)
    if args.warm:
        return warm(args)
    start = time.perf_counter()
    cells = cells_of(args)
    document = {"versions": versions(), "routing": args.routing, "method": "CUDA graph replay", "rows": [], "notes": []}

    def save():
        document["seconds"] = round(time.perf_counter() - start, 1)
        if args.json:
            with open(args.json + ".tmp", "w") as file:
                json.dump(document, file, indent=1)
            os.replace(args.json + ".tmp", args.json)

    def note(text):
        document["notes"].append(f"{time.perf_counter() - start:.1f} s: {text}")
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    child = Child(argv)
    first = [cell for cell in cells if cell[0] == cells[0][0]]
    warmers = []
    if args.device == "cuda":
        shares = max(1, min(12, (os.cpu_count() or 2) - 4))
        warmers = [
            subprocess.Popen([sys.executable, os.path.abspath(__file__), *argv, "--warm", f"{i}/{shares}"])
            for i in range(shares)
        ]
    prepared = set()

    def prepare(part):
        models = {cell[0] for cell in part}
        if not part or models <= prepared:
            return True
        answer = child.ask({"prepare": part}, 120)
        prepared.update(models)
        for text in answer.get("notes", [answer.get("failure", "")]):
            note(text)
        return not answer.get("fatal")

    alive = prepare(first)
    for process in warmers:
        try:
            process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
    note("kernels are warm")
    print(f"{'model':16} {'tokens':>6} {'peer':8} {'us':>9} {'p90':>9} {'error':>8}  variant", flush=True)
    crashes = {}
    for cell in cells:
        model, tokens, peer = cell
        if time.perf_counter() - start > args.max_seconds:
            note(f"out of time before {model} {tokens} {peer}")
            break
        if crashes.get(peer, 0) >= 3:
            answer = {"failure": "its process crashed three times"}
        else:
            if not alive:
                child.close()
                child = Child(argv)
                prepared.clear()
                alive = True
            # What is left of this model; the weights of others are made when their turn comes.
            alive = prepare([c for c in cells if c[0] == model and crashes.get(c[2], 0) < 3])
            answer = {"failure": "could not prepare", "fatal": True}
            if alive:
                answer = child.ask({"cell": cell}, args.hang_seconds)
        if answer.get("fatal"):
            alive = False
            crashes[peer] = crashes.get(peer, 0) + 1
            if "no answer" in answer.get("failure", "") or child.process.poll() is None:
                child.process.kill()
        rows = answer.get("rows", [])
        if "failure" in answer:
            rows.append({"model": model, "tokens": tokens, "peer": peer, "failure": answer["failure"]})
        for row in rows:
            document["rows"].append(row)
            text = f"{row['model']:16} {row['tokens']:6} {row['peer']:8} "
            if "us" in row:
                text += f"{row['us']:9.1f} {row['p90_us']:9.1f} {row['error']:8.4f}  {row['variant']} {row['choice']}"
            else:
                text += f"{row['failure']}  {row.get('variant', '')}"
            print(text, flush=True)
        save()
    save()
    child.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
