"""Many engines and routers on virtual time: the engines' own cores, the routers' own placement and admission."""
