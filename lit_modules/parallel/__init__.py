"""How a network is spread over devices: Lightning strategies, and plans that lie beside the networks they change."""
