"""The main job on a real model: a shared system prompt, and samples that fork from one prompt.

Knows a few questions to ask. What it shows, `LLM` does.
"""

from kvruntime.engine_config import EngineConfig
from kvruntime.llm import LLM
from kvruntime.report import Answer
from kvruntime.sampling_params import SamplingParams
from kvruntime.weights import Progress

__all__ = ["run_demo"]

SYSTEM = (
    "You are a patient teacher. Answer every question in one or two short, plain sentences, "
    "and do not add anything that was not asked for."
)
QUESTIONS = (
    "What is the capital of France?",
    "What does a page table do in an operating system?",
    "Which planet is the largest in our solar system?",
    "What is the boiling point of water in degrees Celsius?",
    "In which country is Tokyo?",
)
STORY = "The old lighthouse keeper opened the door and saw"


def run_demo(model: str, progress: Progress | None = None) -> tuple[LLM, list[Answer]]:
    """Answer the questions in one batch, then continue the story in four seeded samples."""
    llm = LLM(model, EngineConfig(max_model_len=2048), progress=progress)
    conversations = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        for question in QUESTIONS
    ]
    chats = llm.chat(conversations, SamplingParams(max_tokens=48, temperature=0))
    [story] = llm.generate(
        [STORY], SamplingParams(n=4, max_tokens=40, temperature=0.8, top_p=0.95, seed=7)
    )
    return llm, [*zip(QUESTIONS, chats, strict=True), (STORY, story)]
