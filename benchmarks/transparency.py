"""What the log costs: appending an epoch, proving it, and a client's reading of everything since it was here last.

    python -m benchmarks.transparency [--epochs 8760] [--nodes 8]

Times are of the processor, on one core, without fsync's waiting; bytes are what a client fetches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import msgspec

from cloister.trust.transparency.checks import View, believe, needed_paths
from cloister.trust.transparency.epoch import NodeEntry, epoch_leaf, parse_bundle
from tests.trust.transparency.world import World


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8760, help="in the log; one an hour is 8760 a year")
    parser.add_argument("--nodes", type=int, default=8, help="in each epoch")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        world = World(Path(scratch))
        world.publish()
        first = world.publish()
        nodes = [
            NodeEntry(f"{number:064x}", 1, b"", f"{number:064x}", f"node{number}.example.com") for number in range(chosen.nodes)
        ]
        like = msgspec.structs.replace(first.epoch, nodes=tuple(nodes))
        leaves = [epoch_leaf(msgspec.structs.replace(like, epoch=number)) for number in range(3, chosen.epochs)]
        world.log.append(leaves)
        start = time.process_time()
        last = world.publish()
        publish_s = time.process_time() - start
        size = parse_bundle(last.bundle).index + 1
        files = {
            path: found[0] for path in needed_paths(last.bundle, world.trust, View()) if (found := world.log.resource(path))
        }
        start = time.process_time()
        believed = believe(last.bundle, world.trust, View(), files, world.now)
        first_s = time.process_time() - start
        start = time.process_time()
        believe(last.bundle, world.trust, believed.view, {}, world.now)
        again_s = time.process_time() - start
        print(f"entries {size:,}, of {len(leaves[0]):,} bytes with {chosen.nodes} nodes")
        print(f"bundle {len(last.bundle):,} bytes")
        print(f"publish one epoch in a log of that size, cosigned by three witnesses: {1000 * publish_s:.0f} ms")
        print(
            f"first visit of a client: {sum(map(len, files.values())):,} bytes in {len(files)} files, {1000 * first_s:.0f} ms"
        )
        print(f"the log has not grown since: 0 files, {1000 * again_s:.1f} ms")
        print(f"what the client remembers: {len(msgspec.json.encode(believed.view)):,} bytes")
        kept = sum(path.stat().st_size for path in world.log.directory.rglob("*") if path.is_file())
        print(f"the log on disk: {kept:,} bytes")


if __name__ == "__main__":
    main()
