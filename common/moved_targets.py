"""Moved classes: configurations of earlier runs and corpora still have the old paths."""

from typing import Any

DOCS = "data_pipeline.sources.markdown_docs"
MOVED = {
    "data_pipeline.datamodule.LongCrawl64Data": "data_pipeline.tokens.datamodule.LongCrawl64Data",
    "data_pipeline.datamodule.TextData": "data_pipeline.tokens.datamodule.TextData",
    "data_pipeline.mixture.MixtureData": "data_pipeline.mixtures.datamodule.MixtureData",
    "data_pipeline.sources.github_issues.GithubIssues": "data_pipeline.sources.github.github_issues.GithubIssues",
    "data_pipeline.sources.longcrawl64.LongCrawl64": "data_pipeline.tokens.longcrawl64.LongCrawl64",
    f"{DOCS}.MarkdownDocs": f"{DOCS}.markdown_docs.MarkdownDocs",
    "data_pipeline.sources.stackexchange.StackExchange": "data_pipeline.sources.stackexchange.source.StackExchange",
    "data_pipeline.sources.venues.Venues": "data_pipeline.sources.papers.venues.Venues",
    "data_pipeline.sources.web.Web": "data_pipeline.sources.web.web.Web",
    "data_pipeline.tokenizer.ByteLevelBPE": "data_pipeline.tokens.tokenizer.ByteLevelBPE",
    "data_pipeline.tokenizer.Pretrained": "data_pipeline.tokens.tokenizer.Pretrained",
    "lit_modules.callbacks.machines.Machines": "lit_modules.callbacks.device_stats.DeviceStats",
    "lit_modules.generate.run": "lit_modules.generation.job.run",
    "lit_modules.launching.slurm_callback.ThroughSlurm": "lit_modules.launching.slurm_callback.SlurmLaunching",
    "lit_modules.launching.slurm.ThroughSlurm": "lit_modules.launching.slurm_callback.SlurmLaunching",
    "lit_modules.linearize.run": "lit_modules.jobs.linearize.run",
    "lit_modules.loggers.Wandb": "lit_modules.loggers.wandb.Wandb",
    "lit_modules.planning.run": "lit_modules.jobs.plan.run",
    "lit_modules.pretrain.run": "lit_modules.jobs.pretrain.run",
    "lit_modules.wandb_sync.run": "lit_modules.loggers.wandb_sync.run",
}


def with_current_targets(config: Any) -> Any:
    """Return a configuration of plain containers with each `_target_` at its current path."""
    if isinstance(config, list):
        return [with_current_targets(each) for each in config]
    if not isinstance(config, dict):
        return config
    current = {key: with_current_targets(value) for key, value in config.items()}
    target = config.get("_target_")
    return current | ({"_target_": MOVED[target]} if target in MOVED else {})
