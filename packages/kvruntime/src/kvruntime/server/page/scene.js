// What is drawn, worked out from a snapshot once: of each block its state, who holds it, how full it is.

export class Scene {
  constructor(snapshot, palette) {
    this.snapshot = snapshot;
    const { num_blocks: numBlocks, block_size: blockSize } = snapshot;
    this.numBlocks = numBlocks;
    this.states = snapshot.states;
    this.counts = snapshot.ref_counts;
    this.colours = new Uint8Array(numBlocks); // a bit for each colour among its holders
    this.filled = new Uint16Array(numBlocks); // slots that hold a token
    palette.update(snapshot.requests.map((request) => request.id));
    for (const request of snapshot.requests) {
      const bit = 1 << palette.of(request.id);
      for (const sequence of request.sequences) {
        sequence.block_table.forEach((block, index) => {
          if (block < 0) return; // a sliding window has left it behind
          const filled = Math.min(blockSize, Math.max(0, sequence.num_computed - index * blockSize));
          this.colours[block] |= bit;
          this.filled[block] = Math.max(this.filled[block], filled);
        });
      }
    }
    this.numShared = this.counts.reduce((sum, count) => sum + (count > 1), 0);
  }

  isHeld(block) {
    return this.counts[block] > 0;
  }

  // The places where a block stands in tables: request, sample and logical index.
  holders(block) {
    const found = [];
    for (const request of this.snapshot.requests) {
      for (const sequence of request.sequences) {
        const index = sequence.block_table.indexOf(block);
        if (index >= 0) found.push({ request, sequence, index });
      }
    }
    return found;
  }

  // A block in words, for a pointer, for the keyboard and for a screen reader.
  describe(block) {
    const blockSize = this.snapshot.block_size;
    const holders = this.holders(block);
    if (!holders.length) return `block ${block}: ${REST[this.states[block]] ?? "held"}`;
    const filled = `${this.filled[block]} of ${blockSize} slots filled`;
    const first = holders.length > 1 ? `shared, in ${holders.length} tables, ${filled}` : filled;
    const lines = holders.slice(0, 8).map(({ request, sequence, index }) => {
      const sample = request.sequences.length > 1 ? `, sample ${sequence.index}` : "";
      return `request ${request.id}${sample}: its block ${index}`;
    });
    if (holders.length > 8) lines.push(`and ${holders.length - 8} more`);
    return [`block ${block}: ${first}`, ...lines].join("\n");
  }
}

const REST = {
  c: "cached; it can be found, and is evicted when room is needed",
  f: "free",
  x: "fenced; free when the step that uses it is over",
};
