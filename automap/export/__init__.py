"""Plans written as the configurations of trainers, one module a trainer (docs/exports.md)."""
