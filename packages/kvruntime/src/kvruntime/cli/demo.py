"""`kvruntime demo`: prefix sharing and copy-on-write on a real model."""

from kvruntime.cli import options

__all__ = ["demo"]


def demo(model: options.Model = "smollm2", as_json: options.Json = False) -> None:
    """Show prefix sharing and copy-on-write on a real model."""
    from kvruntime.cli.show import show
    from kvruntime.demo import run_demo
    from kvruntime.report import progress_bars

    with progress_bars() as progress:
        llm, answers = run_demo(model, progress)
    show(llm, answers, as_json=as_json)
