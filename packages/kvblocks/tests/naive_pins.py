"""An engine that pins prefixes now and then, on top of the naive one."""

from kvblocks import InvalidPin, PinLimit

from .naive_engine import Engine


class PinningEngine(Engine):
    """What must be true of pins: a sequence without lengths, that is refused past its share."""

    def operate(self) -> None:
        if self.rng.random() < 0.1:
            self.rng.choice((self.pin, self.pin, self.unpin))()
        super().operate()
        assert self.manager.stats().num_pinned_blocks == len(self.pinned)

    def pin(self) -> None:
        salt, tokens = self.some_prompt()
        num_full = len(tokens) // self.size
        nodes = self.tree.walk(salt, tokens[: num_full * self.size])
        hits = self.match_naively(salt, [*nodes, -1])
        self.names += 1
        name = self.names

        def call() -> object:
            return self.manager.pin(name, tokens, salt=salt)

        if len(hits) < num_full or not hits:
            self.refuse(call, InvalidPin)
        elif len(self.pinned | set(hits)) > self.n // 2:
            self.refuse(call, PinLimit)
        else:
            assert self.manager.pin(name, tokens, salt=salt).block_ids == tuple(hits)
            self.pins[name] = salt, hits

    def unpin(self) -> None:
        if not self.pins:
            self.refuse(lambda: self.manager.unpin(0), InvalidPin)
            return
        name = self.rng.choice(list(self.pins))
        self.manager.unpin(name)
        self.unpin_naively(name)
