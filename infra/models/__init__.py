"""Model families: where weights come from, and what each engine must know of them."""
