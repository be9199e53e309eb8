"""Statistics of casts that do not run, and of codes that another library made."""
