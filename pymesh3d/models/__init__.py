"""The model that is trained (`llama`), and the same in nothing but torch (`plain`)."""
