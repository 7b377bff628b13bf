"""How servers answer under load: the same client, requests and weights, one server after the other."""
