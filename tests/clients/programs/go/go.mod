module quire.example/clients

go 1.19

require github.com/sashabaranov/go-openai v1.43.0
