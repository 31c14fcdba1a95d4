"""OpenRLHF's flags and their settings here: the single source of ``docs/openrlhf.md`` and of the conversion.

A row: the flag with its arguments, its dotted name, the settings here (by their unique names; empty: none, for the
reason in the note), OpenRLHF's default, and what differs.
"""

from __future__ import annotations

from typing import Final

Row = tuple[str, str, str, str, str]

_ROLE: Final = "no placement by role: actor, reference and critic are one model with adapters in one process"

MODELS: Final[list[Row]] = [
    ("pretrain X", "actor.model_name_or_path", "model_name", "–", ""),
    ("reward_pretrain X", "reward.model_name_or_path", "", "–",
     "no separate reward model: a judge or the offline check scores answers; serve your own model behind `reward`"),
    ("critic_pretrain X", "critic.model_name_or_path", "", "as pretrain",
     "no separate critic: the value head of gae shares the policy's backbone and adapter"),
    ("prompt_data X", "data.prompt_dataset", "questions", "–",
     "a question file or dataset folder (docs/data.md): questions about mail, not bare prompts"),
    ("input_key X", "data.input_key", "question_field", "`input`", ""),
    ("label_key X", "data.label_key", "answer_field", "–", "the reference answer used by the reward"),
    ("output_key X", "data.output_key", "output_field", "–",
     "SFT only: the answer that `sft --questions` teaches"),
    ("apply_chat_template", "data.apply_chat_template", "chat_template", "off",
     "always on: the model's own template or the file `chat_template` renders tools and turns"),
    ("input_template X", "data.input_template", "question_template", "–",
     "`{}` is replaced by the question in the user message"),
    ("max_samples X", "data.max_samples", "train_dataset_size", "1e8", "sampled to keep the mix of kinds and inboxes"),
    ("prompt_split X", "data.prompt_split", "train_split", "`train`",
     "val and test are refused: they are held out"),
]  # fmt: skip

PLACEMENT: Final[list[Row]] = [
    ("actor_num_nodes X", "actor.num_nodes", "nnodes", "1",
     "run the same command on each host, with `--rdzv-endpoint`"),
    ("actor_num_gpus_per_node X", "actor.num_gpus_per_node", "nproc", "8",
     "ranks on each host; each trains `per_device_train_batch_size` questions per step"),
    ("critic_num_nodes X", "critic.num_nodes", "", "1", _ROLE),
    ("critic_num_gpus_per_node X", "critic.num_gpus_per_node", "", "8", _ROLE),
    ("ref_num_nodes X", "ref.num_nodes", "", "1", _ROLE),
    ("ref_num_gpus_per_node X", "ref.num_gpus_per_node", "", "8", _ROLE),
    ("reward_num_nodes X", "reward.num_nodes", "", "1", _ROLE),
    ("reward_num_gpus_per_node X", "reward.num_gpus_per_node", "", "8", _ROLE),
    ("colocate_all_models", "train.colocate_all", "vllm_urls", "off",
     "without `vllm_urls`, every rank samples on its own GPU, in turn with training; servers use their own GPUs"),
    ("colocate_actor_ref", "train.colocate_actor_ref", "", "off",
     "not applicable: the reference is the policy with its adapter off"),
    ("colocate_critic_reward", "train.colocate_critic_reward", "", "off",
     "not applicable: the critic is a head of the policy, a reward model runs on its own server"),
]  # fmt: skip

VLLM: Final[list[Row]] = [
    ("vllm_tensor_parallel_size X", "vllm.tensor_parallel_size", "vllm_tensor_parallel_size", "1",
     "in process: that many neighboring ranks share an engine"),
    ("vllm_num_engines X", "vllm.num_engines", "engine vllm_urls", "–",
     "0: transformers in process; with `--colocate_all_models` one for each `vllm_tensor_parallel_size` ranks; "
     "without, 1: vLLM in process, more: `emailrl serve --replicas`, listed in `vllm_urls`"),
    ("async_train", "train.async_enable", "max_staleness", "off",
     "the next step is sampled during training, which needs vLLM servers; rollouts are never dropped"),
    ("async_queue_size X", "train.async_queue_size", "max_staleness", "1", "steps that sampling may be ahead"),
    ("vllm_gpu_memory_utilization X", "vllm.gpu_memory_utilization", "vllm_gpu_memory_utilization", "0.95", ""),
    ("vllm_sync_backend X", "vllm.sync_backend", "", "`nccl`",
     "weights are not broadcast: engines load the adapter's folder, with a new name per version"),
    ("enforce_eager", "vllm.enforce_eager", "vllm_enforce_eager", "off", ""),
    ("enable_prefix_caching", "vllm.enable_prefix_caching", "vllm_enable_prefix_caching", "off", "on by default here"),
    ("vllm_enable_sleep", "vllm.enable_sleep", "vllm_enable_sleep", "off", "`auto` by default here: unless both fit"),
]  # fmt: skip

DEEPSPEED: Final[list[Row]] = [
    ("zero_stage X", "ds.zero_stage", "shard", "2",
     "0 to 2: `off`, the base is frozen and has no gradients or optimizer states to partition; 3: `host`"),
    ("gradient_checkpointing", "actor.gradient_checkpointing_enable", "gradient_checkpointing", "off", ""),
    ("adam_offload", "ds.adam_offload", "shard_offload", "off",
     "only for a sharded base, which moves to host memory; Adam's states are only the adapter's and stay on the GPU"),
    ("deepspeed_enable_sleep", "ds.enable_sleep", "shard_offload", "off",
     "only for a sharded base, which leaves the GPU whenever it is not computing, rollouts included"),
    ("overlap_comm", "ds.overlap_comm", "", "off", "DeepSpeed's own"),
    ("ds_tensor_parallel_size X", "ds.tensor_parallel_size", "", "1", "DeepSpeed's own"),
    ("ring_attn_size X", "ds.ring_attn_size", "", "1", "DeepSpeed's own"),
    ("ring_head_stride X", "ds.ring_attn_head_stride", "", "1", "DeepSpeed's own"),
]  # fmt: skip

BATCHES: Final[list[Row]] = [
    ("train_batch_size X", "train.batch_size", "num_mini_batches", "128",
     "trajectories per optimizer update; `num_mini_batches` is a step's rollouts divided by it"),
    ("rollout_batch_size X", "rollout.batch_size", "per_device_train_batch_size", "1024",
     "questions per step, divided by the ranks (`nproc` x `nnodes`)"),
    ("micro_train_batch_size X", "train.micro_batch_size", "max_rows_per_micro_batch", "4",
     "in addition to the token limit; not set with `--use_dynamic_batch`"),
    ("micro_rollout_batch_size X", "rollout.micro_batch_size", "reward_batch_size max_batch_trajectories", "8",
     "trajectories per request to the reward server; without vLLM also those decoded concurrently"),
    ("n_samples_per_prompt X", "rollout.n_samples_per_prompt", "num_generations", "1", ""),
    ("use_dynamic_batch", "train.dynamic_batch_enable", "max_tokens_per_micro_batch", "off",
     "always on: micro-batches are filled up to a token limit"),
    ("train_max_tokens_per_gpu X", "train.max_tokens_per_gpu", "max_tokens_per_micro_batch", "16192", ""),
    ("rollout_max_tokens_per_gpu X", "rollout.max_tokens_per_gpu", "max_tokens_per_rollout_pass", "as training",
     "prompt tokens per pass of the in-process engine; vLLM servers have their own flag"),
    ("packing_samples", "ds.packing_samples", "packing", "off", "on by default here"),
]  # fmt: skip

OPTIMIZER: Final[list[Row]] = [
    ("actor_learning_rate X", "actor.adam.lr", "learning_rate", "1e-6", ""),
    ("critic_learning_rate X", "critic.adam.lr", "critic_learning_rate", "9e-6",
     "applies only to the critic's head here, so the default is larger"),
    ("lr_scheduler X", "actor.lr_scheduler", "lr_scheduler min_lr_ratio", "`cosine_with_min_lr`",
     "`cosine_with_min_lr` is `cosine` with `min_lr_ratio = 0.1`"),
    ("min_lr_ratio X", "actor.min_lr_ratio", "min_lr_ratio", "0.1", ""),
    ("lr_warmup_ratio X", "actor.lr_warmup_ratio", "warmup_ratio", "0.03", ""),
    ("adam_betas L H", "actor.adam.betas", "adam_beta1 adam_beta2", "0.9 0.95", ""),
    ("l2 X", "actor.adam.weight_decay", "weight_decay", "0", ""),
    ("max_norm X", "actor.max_norm", "max_grad_norm", "1.0", ""),
    ("max_epochs X", "train.max_epochs", "update_epochs", "1", "passes over the rollouts of each step"),
    ("num_episodes X", "train.num_episodes", "num_train_epochs", "1",
     "passes over the questions; limits modes simple and rollout, while masked stops only at `max_steps`"),
    ("max_steps X", "", "max_steps", "computed", ""),
    ("seed X", "train.seed", "seed", "42", ""),
]  # fmt: skip

KL: Final[list[Row]] = [
    ("init_kl_coef X", "algo.kl.init_coef", "beta", "0.01", ""),
    ("kl_target X", "algo.kl.target", "kl_target", "–", ""),
    ("kl_horizon X", "algo.kl.horizon", "kl_horizon", "10000", ""),
    ("use_kl_loss", "algo.kl.use_loss", "kl_in", "off", "off: `reward`"),
    ("kl_estimator X", "algo.kl.estimator", "kl_estimator", "`k1`", ""),
]  # fmt: skip

ALGORITHM: Final[list[Row]] = [
    ("advantage_estimator X", "algo.advantage.estimator", "algorithm whiten_advantages loss_aggregation", "`gae`",
     "gae: `ppo`, reinforce: `reinforce_pp`, group_norm: `grpo`; whitening and aggregation follow OpenRLHF"),
    ("eps_clip X", "actor.eps_clip", "clip_low clip_high", "0.2", ""),
    ("eps_clip_low_high L H", "actor.eps_clip_low_high", "clip_low clip_high", "–", ""),
    ("dual_clip X", "actor.dual_clip", "dual_clip", "–", ""),
    ("value_clip X", "critic.value_clip", "value_clip", "0.5", "gae only"),
    ("gamma X", "algo.advantage.gamma", "gamma", "1", "gae and reinforce only, as in OpenRLHF"),
    ("lambd X", "algo.advantage.lambd", "gae_lambda", "1",
     "gae only; counts trained tokens, whereas OpenRLHF counts tool results too"),
    ("policy_loss_type X", "actor.policy_loss_type", "ratio_level loss_aggregation", "`ppo`",
     "gspo: one ratio per sequence and the mean over sequences"),
    ("entropy_loss_coef X", "actor.entropy_coef", "entropy_coef", "–", ""),
    ("normalize_reward", "", "", "off",
     "not needed: reward terms have the scale that their settings define"),
    ("reward_clip_range L H", "reward.clip_range", "reward_clip_low reward_clip_high", "-10 10", ""),
    ("enable_vllm_is_correction", "algo.advantage.is_correction_enable", "importance_correction", "off", "`tis`"),
    ("vllm_is_truncated_threshold L H", "algo.advantage.is_correction_threshold", "correction_low correction_high",
     "0.5 5.0", "the lower bound of `tis` is 0 by default here"),
    ("use_icepop", "", "importance_correction", "off", "`icepop`"),
    ("is_correction_type X", "algo.advantage.is_correction_type", "importance_correction", "`tis`",
     "seq-mask-tis: `sequence_mask`"),
    ("dynamic_filtering", "algo.dynamic_filtering_enable", "dynamic_filtering filter_on", "off",
     "filters on accuracy, or on the reward if it is custom"),
    ("dynamic_filtering_reward_range L H", "algo.dynamic_filtering_range", "filter_low filter_high", "0 1", ""),
    ("overlong_buffer_len X", "reward.overlong_buffer_len", "overlong_buffer", "–",
     "applies to the longest completion"),
    ("overlong_penalty_factor X", "reward.overlong_penalty_factor", "overlong_penalty", "1", ""),
]  # fmt: skip

AGENT: Final[list[Row]] = [
    ("agent_func_path X", "train.agent_func_path", "environment", "–",
     "the file's class `Environment`, with start() and step() instead of reset() and step(): docs/custom.md"),
    ("remote_rm_url X", "reward.remote_url", "reward", "–",
     "a URL, or the unchanged `reward_func` of a Python file: docs/custom.md"),
    ("prompt_max_len X", "", "max_model_len", "1024",
     "one window for the whole conversation, which grows each turn: prompt_max_len + generate_max_len"),
    ("generate_max_len X", "rollout.max_new_tokens", "max_tokens", "1024", "per turn"),
    ("max_len X", "data.max_len", "max_model_len", "2048", ""),
    ("temperature X", "rollout.temperature", "temperature", "1.0", ""),
    ("top_p X", "rollout.top_p", "top_p", "1.0", ""),
    ("top_k X", "rollout.top_k", "top_k", "-1", "-1 (all tokens) is 0 here"),
]  # fmt: skip

PRECISION: Final[list[Row]] = [
    ("param_dtype X", "ds.param_dtype", "dtype", "`bf16`", "of the frozen base; fp32 by default on a CPU"),
    ("bf16", "", "dtype", "off", "before 0.9.2: `bf16`"),
    ("attn_implementation X", "ds.attn_implementation", "attn_implementation", "`flash_attention_2`",
     "packing needs `sdpa`"),
    ("flash_attn", "", "attn_implementation", "off", "before 0.9.2: `flash_attention_2`"),
    ("load_in_4bit", "ds.load_in_4bit", "load_in_4bit", "off", ""),
    ("lora_rank X", "ds.lora.rank", "lora_rank", "0", "0 (all weights) is refused: `train` trains an adapter"),
    ("lora_alpha X", "ds.lora.alpha", "lora_alpha", "16", ""),
    ("lora_dropout X", "ds.lora.dropout", "lora_dropout", "0", ""),
    ("target_modules X …", "ds.lora.target_modules", "target_modules", "`all-linear`", ""),
]  # fmt: skip

CHECKPOINTS: Final[list[Row]] = [
    ("save_path X", "ckpt.output_dir", "export_dir", "`./ckpt`", "exports the best model rather than the last"),
    ("ckpt_path X", "ckpt.path", "output_dir", "`./ckpt/…`", "the mode is appended; also holds trajectories"),
    ("load_checkpoint", "ckpt.load_enable", "resume", "off", "`auto`"),
    ("save_steps X", "ckpt.save_steps", "save_steps", "-1", "-1: none in between; best and last are always kept"),
    ("save_hf_ckpt", "ckpt.save_hf", "export_format", "off",
     "`merged`: a complete transformers model in `export_dir`; checkpoints are already PEFT adapters"),
    ("max_ckpt_num X", "ckpt.max_num", "save_total_limit", "3", ""),
    ("logging_steps X", "logger.logging_steps", "logging_steps", "1", "metrics.jsonl always has every step"),
    ("eval_steps X", "eval.steps", "eval_steps", "-1", "-1: none in between; step 0 and the last are always evaluated"),
    ("use_wandb X", "logger.wandb.key", "wandb_mode", "–",
     "`online`; the key is never written: use WANDB_API_KEY or `wandb login`"),
    ("wandb_project X", "logger.wandb.project", "wandb_project", "`openrlhf_train_ppo`", ""),
    ("wandb_run_name X", "logger.wandb.run_name", "wandb_name", "by time", ""),
    ("use_tensorboard X", "logger.tensorboard_dir", "tensorboard tensorboard_dir", "–", ""),
]  # fmt: skip

ROWS: Final[dict[str, list[Row]]] = {
    "Model and data": MODELS,
    "Placement": PLACEMENT,
    "vLLM": VLLM,
    "DeepSpeed": DEEPSPEED,
    "Batches": BATCHES,
    "Optimizer and length of training": OPTIMIZER,
    "KL": KL,
    "Algorithm": ALGORITHM,
    "Agent and sampling": AGENT,
    "Precision and LoRA": PRECISION,
    "Checkpoints and logging": CHECKPOINTS,
}
