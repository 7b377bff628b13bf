// Which of the few colours a request has: the first that nobody else has while it lives.

export const NUM_COLOURS = 7;

export class Palette {
  constructor() {
    this.colours = new Map();
  }

  // Give colours to who is there, and take them from who is not.
  update(ids) {
    const present = new Set(ids);
    for (const id of this.colours.keys()) if (!present.has(id)) this.colours.delete(id);
    const uses = new Array(NUM_COLOURS).fill(0);
    for (const colour of this.colours.values()) uses[colour] += 1;
    for (const id of ids) {
      if (this.colours.has(id)) continue;
      const colour = uses.indexOf(Math.min(...uses));
      uses[colour] += 1;
      this.colours.set(id, colour);
    }
  }

  of(id) {
    return this.colours.get(id) ?? 0;
  }
}

// The colours of the style sheet as they are now, light or dark, for drawing on a canvas.
export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    requests: Array.from({ length: NUM_COLOURS }, (_, index) => colour(`c${index}`)),
    paper: colour("paper"),
    ink: colour("ink"),
    rule: colour("rule"),
    resting: colour("resting"),
  };
}
