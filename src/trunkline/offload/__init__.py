"""Where a tensor rests: `device` memory, `host` memory, or a file on `disk`, each with a budget in bytes."""
