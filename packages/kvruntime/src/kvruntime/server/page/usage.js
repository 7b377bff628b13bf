// The pool in one bar, and the key to the map with the number of blocks of each kind.

const KINDS = [
  { name: "held by one", mark: "held", tip: "in one block table" },
  { name: "shared", mark: "shared", tip: "in several block tables; the number on a block counts them" },
  { name: "cached", mark: "cached", tip: "in no table, but found by prompts that begin alike" },
  { name: "free", mark: "free", tip: "holds nothing" },
];
const HOST = { name: "in host memory", mark: "host", tip: "blocks of requests that are swapped out" };

export class Usage {
  constructor(bar, key, lead) {
    this.lead = lead;
    this.parts = KINDS.map((kind) => {
      const part = document.createElement("i");
      if (kind.mark !== "free") part.className = `mark-${kind.mark}`;
      bar.append(part);
      return { part, ...addEntry(key, kind) };
    });
    this.host = addEntry(key, HOST);
  }

  show(scene) {
    const { num_blocks: all, num_held: held, num_cached: cached, num_free: free, block_size: size } = scene.snapshot;
    const counts = [held - scene.numShared, scene.numShared, cached, free];
    this.parts.forEach(({ part, count }, index) => {
      part.style.flexBasis = `${(100 * counts[index]) / all}%`;
      count.textContent = counts[index].toLocaleString("en");
    });
    const host = scene.snapshot.num_host_blocks - scene.snapshot.num_free_host_blocks;
    this.host.entry.hidden = host === 0;
    this.host.count.textContent = host.toLocaleString("en");
    this.lead.textContent =
      `Every square is one block of the key-value cache, ${size} tokens long; there are ${all.toLocaleString("en")}. ` +
      "Its colour says which request holds it.";
  }
}

function addEntry(key, { name, mark, tip }) {
  const entry = document.createElement("li");
  entry.title = tip;
  const sign = document.createElement("i");
  sign.className = `mark-${mark}`;
  const count = document.createElement("b");
  entry.append(sign, `${name} `, count);
  key.append(entry);
  return { entry, count };
}
