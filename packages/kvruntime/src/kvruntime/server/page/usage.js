// The pool in one bar, and the key to the map with the number of blocks of each kind.

const KINDS = [
  { name: "held by one", mark: "held", tip: "in one block table" },
  { name: "shared", mark: "shared", tip: "in several block tables; the number on a block counts them" },
  { name: "cached", mark: "cached", tip: "in no table, but found by prompts that begin alike" },
  { name: "free", mark: "free", tip: "holds nothing" },
];

export class Usage {
  constructor(bar, key, lead) {
    this.lead = lead;
    this.parts = KINDS.map(({ name, mark, tip }) => {
      const part = document.createElement("i");
      if (mark !== "free") part.className = `mark-${mark}`;
      const entry = document.createElement("li");
      entry.title = tip;
      const sign = document.createElement("i");
      sign.className = `mark-${mark}`;
      const count = document.createElement("b");
      entry.append(sign, `${name} `, count);
      bar.append(part);
      key.append(entry);
      return { part, count };
    });
  }

  show(scene) {
    const { num_blocks: all, num_held: held, num_cached: cached, num_free: free, block_size: size } = scene.snapshot;
    const counts = [held - scene.numShared, scene.numShared, cached, free];
    this.parts.forEach(({ part, count }, index) => {
      part.style.flexBasis = `${(100 * counts[index]) / all}%`;
      count.textContent = counts[index].toLocaleString("en");
    });
    this.lead.textContent =
      `Every square is one block of the key-value cache, ${size} tokens long; there are ${all.toLocaleString("en")}. ` +
      "Its colour says which request holds it.";
  }
}
