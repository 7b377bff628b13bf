"""An engine that pins prefixes now and then, on top of the naive one."""

from kvblocks import InvalidPin, Media, PinLimit

from .naive_engine import Engine


class PinningEngine(Engine):
    """What must be true of pins: a sequence without lengths, that is refused past its share."""

    def operate(self) -> None:
        if self.rng.random() < 0.1:
            self.rng.choice((self.pin, self.pin, self.unpin))()
        super().operate()
        assert self.manager.stats().num_pinned_blocks == len(self.pinned)

    def pin(self) -> None:
        namespace, tokens, media = self.some_prompt()
        salt, adapter = namespace
        num_full = len(tokens) // self.size
        nodes = self.tree.walk(namespace, tokens[: num_full * self.size], media)
        hits = self.match_naively(namespace, [*nodes, -1])
        where = [Media(*item) for item in media.items()]
        self.names += 1
        name = self.names

        def call() -> object:
            return self.manager.pin(name, tokens, salt=salt, adapter=adapter, media=where)

        if len(hits) < num_full or not hits:
            self.refuse(call, InvalidPin)
        elif len(self.pinned | set(hits)) > self.n // 2:
            self.refuse(call, PinLimit)
        else:
            match = self.manager.pin(name, tokens, salt=salt, adapter=adapter, media=where)
            assert match.block_ids == tuple(hits)
            self.pins[name] = namespace, hits

    def unpin(self) -> None:
        if not self.pins:
            self.refuse(lambda: self.manager.unpin(0), InvalidPin)
            return
        name = self.rng.choice(list(self.pins))
        self.manager.unpin(name)
        self.unpin_naively(name)
