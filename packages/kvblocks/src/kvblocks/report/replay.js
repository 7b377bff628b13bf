(() => {
  const data = document.getElementById("frames");
  if (!data) return;
  const { kinds, colours, frames } = JSON.parse(data.textContent);
  const map = document.getElementById("blocks");
  const cells = [...map.querySelectorAll("rect")];
  const slider = document.getElementById("frame");
  const play = document.getElementById("play");
  const line = document.getElementById("call");
  const tip = document.getElementById("tip");
  const columns = Number(map.dataset.columns);
  const free = kinds.length - 1;
  let uses = [];
  let shown = -1;
  let chosen = -1;
  let timer = 0;

  function visit(frame) {
    if (frame < shown || shown < 0) {
      uses = cells.map(() => [free, ""]);
      shown = -1;
    }
    while (shown < frame) {
      shown += 1;
      for (const [block, kind, holders] of frames[shown].changes) uses[block] = [kind, holders];
    }
    cells.forEach((cell, block) => cell.setAttribute("class", `fill ${colours[uses[block][0]]}`));
    line.textContent = frames[frame].text;
    if (chosen >= 0) point(chosen);
  }

  function point(block) {
    if (chosen >= 0) cells[chosen].style.stroke = "";
    chosen = block;
    if (block < 0) {
      tip.hidden = true;
      return;
    }
    const [kind, holders] = uses[block];
    cells[block].style.stroke = "var(--ink)";
    tip.textContent = `block ${block}: ${kinds[kind]}${holders ? `\n${holders}` : ""}`;
    tip.hidden = false;
    const box = cells[block].getBoundingClientRect();
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(box.right + 8, innerWidth - width - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(box.bottom + 8, innerHeight - height - 4))}px`;
  }

  function stop() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "Play";
  }

  slider.addEventListener("input", () => {
    stop();
    visit(Number(slider.value));
  });
  play.hidden = false;
  play.addEventListener("click", () => {
    if (timer) {
      stop();
      return;
    }
    if (Number(slider.value) === frames.length - 1) slider.value = 0;
    play.textContent = "Stop";
    timer = setInterval(() => {
      visit(Number(slider.value));
      if (Number(slider.value) === frames.length - 1) stop();
      else slider.value = Number(slider.value) + 1;
    }, 60);
  });
  map.addEventListener("pointermove", (event) => {
    const block = cells.indexOf(event.target);
    if (block >= 0) point(block);
  });
  map.addEventListener("pointerleave", () => point(-1));
  map.addEventListener("blur", () => point(-1));
  map.addEventListener("focus", () => point(0));
  map.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (event.key === "Escape") point(-1);
    else if (event.key in steps) {
      const block = Math.max(chosen, 0) + steps[event.key];
      if (block >= 0 && block < cells.length) point(block);
      event.preventDefault();
    }
  });
  visit(frames.length - 1);
})();
