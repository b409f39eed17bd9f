#!/usr/bin/env python3
"""Puts the results of peers.py beside those of hexpert, as a Markdown table.

    hexpert bench --backend cuda-sm90a --stage layer --model qwen3-30b --tokens 1,32,512 --json hexpert.json
    bench/peers/compare.py hexpert.json peers.json

Several files of each kind may be given; of several results for a cell the fastest counts. A ratio is the time of the
peer over the time of hexpert: above 1 hexpert is faster.
"""

import argparse
import json
import math
import sys


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def read(paths):
    """Microseconds by (model, tokens, routing): of hexpert, and of the peers by name; and the failures of peers."""
    hexpert, peers, failures = {}, {}, {}
    for path in paths:
        with open(path) as file:
            document = json.load(file)
        for row in document["rows"]:
            key = (row["model"], row["tokens"], row.get("routing", document.get("routing", "uniform")))
            if "peer" not in row:
                if row["stage"] == "layer":
                    hexpert[key] = min(row["us"], hexpert.get(key, math.inf))
            elif "us" in row:
                cell = peers.setdefault(key, {})
                cell[row["peer"]] = min(row["us"], cell.get(row["peer"], math.inf))
            else:
                failures[(*key, row["peer"])] = row["failure"]
    return hexpert, peers, failures


def number(us):
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def table(hexpert, peers):
    names = sorted({name for cell in peers.values() for name in cell})
    routings = {key[2] for key in hexpert}
    head = ["model", "tokens", "hexpert us", *(f"{name} us" for name in names), "best peer / hexpert"]
    lines = ["| " + " | ".join(head) + " |", "|---" * 2 + "|---:" * (len(head) - 2) + "|"]
    ratios = {}  # best and by peer, by model
    last = None
    for key in hexpert:
        cell = peers.get(key)
        if not cell:
            continue
        model, tokens, routing = key
        best = min(cell, key=cell.get)
        for name in (*cell, "best"):
            ratio = cell[best if name == "best" else name] / hexpert[key]
            ratios.setdefault(model, {}).setdefault(name, []).append(ratio)
        title = model if len(routings) == 1 else f"{model}, {routing}"
        cells = [title if title != last else "", str(tokens), number(hexpert[key])]
        cells += [number(cell[name]) if name in cell else "-" for name in names]
        cells.append(f"{cell[best] / hexpert[key]:.2f} ({best})")
        last = title
        lines.append("| " + " | ".join(cells) + " |")
    if not ratios:
        return "no cell has both a result of hexpert and one of a peer"
    lines += ["", "Geometric means, peer / hexpert:", ""]
    lines.append("| model | cells | best peer | " + " | ".join(names) + " |")
    lines.append("|---|" + "---:|" * (len(names) + 2))
    everything = {}
    for by_name in ratios.values():
        for name, values in by_name.items():
            everything.setdefault(name, []).extend(values)
    for title, by_name in (*ratios.items(), ("all", everything)):
        cells = [title, str(len(by_name["best"]))]
        for name in ("best", *names):
            cells.append(f"{geometric_mean(by_name[name]):.2f}" if name in by_name else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON of hexpert bench and of peers.py")
    args = parser.parse_args(argv)
    hexpert, peers, failures = read(args.files)
    print(table(hexpert, peers))
    missing = {key: text for key, text in failures.items() if key[3] not in peers.get(key[:3], {})}
    for (model, tokens, _, peer), text in missing.items():
        print(f"no result: {model} {tokens} {peer}: {text}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
