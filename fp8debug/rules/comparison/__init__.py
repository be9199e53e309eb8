"""Two runs side by side: their sites, their losses, their configurations."""
