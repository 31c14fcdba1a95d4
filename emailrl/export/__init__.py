"""Exports a checkpoint as a folder that others can load and serve (`folder`), with its README (`card`)."""

from emailrl.export.folder import Export, Format, check_free, export_checkpoint

__all__ = ["Export", "Format", "check_free", "export_checkpoint"]
