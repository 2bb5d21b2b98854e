// Command clients drives the go-openai package: clients URL SLOW_URL SCENARIOS. It prints one JSON object of what it saw.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	openai "github.com/sashabaranov/go-openai"
)

type scenarios struct {
	First, Cities []openai.ChatCompletionMessage
	Second        openai.ChatCompletionMessage
	Result        string
	Forced        struct {
		LogitBias map[string]int `json:"logit_bias"`
	}
	Tool    openai.Tool
	Endless struct {
		LogitBias map[string]int `json:"logit_bias"`
		MaxTokens int            `json:"max_tokens"`
	}
}

type seen struct {
	Text      string `json:"text,omitempty"`
	Arguments string `json:"arguments,omitempty"`
	Usage     []int  `json:"usage,omitempty"`
	Error     string `json:"error,omitempty"`
}

var given scenarios

func client(url string) *openai.Client {
	config := openai.DefaultConfig("none")
	config.BaseURL = url + "/v1"
	return openai.NewClientWithConfig(config)
}

// request asks greedily: the smallest temperature that the package does not leave out.
func request(messages []openai.ChatCompletionMessage) openai.ChatCompletionRequest {
	return openai.ChatCompletionRequest{Model: "tools", Temperature: 1e-9, MaxTokens: 128, Messages: messages}
}

func read(c *openai.Client, r openai.ChatCompletionRequest) (message openai.ChatCompletionMessage, usage []int, err error) {
	stream, err := c.CreateChatCompletionStream(context.Background(), r)
	if err != nil {
		return
	}
	defer stream.Close()
	message.Role = "assistant"
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return message, usage, nil
		}
		if err != nil {
			return message, usage, err
		}
		if chunk.Usage != nil {
			usage = []int{chunk.Usage.PromptTokens, chunk.Usage.CompletionTokens}
		}
		for _, choice := range chunk.Choices {
			message.Content += choice.Delta.Content
			for _, call := range choice.Delta.ToolCalls {
				add(&message, call)
			}
		}
	}
}

// add puts a piece of a call to the calls, whose elements keep the index that the stream gave them.
func add(message *openai.ChatCompletionMessage, piece openai.ToolCall) {
	at := *piece.Index
	if at == len(message.ToolCalls) {
		message.ToolCalls = append(message.ToolCalls, piece)
		return
	}
	message.ToolCalls[at].Function.Arguments += piece.Function.Arguments
}

func streamed(c *openai.Client) (seen, error) {
	r := request(given.First)
	r.StreamOptions = &openai.StreamOptions{IncludeUsage: true}
	message, usage, err := read(c, r)
	return seen{Text: message.Content, Usage: usage}, err
}

func secondTurn(c *openai.Client) (seen, error) {
	message, _, err := read(c, request(given.First))
	if err != nil {
		return seen{}, err
	}
	answer, err := c.CreateChatCompletion(context.Background(), request(append(append([]openai.ChatCompletionMessage{}, given.First...), message, given.Second)))
	if err != nil {
		return seen{}, err
	}
	return seen{Text: answer.Choices[0].Message.Content}, nil
}

func toolLoop(c *openai.Client) (seen, error) {
	r := request(given.Cities)
	r.Tools, r.ToolChoice, r.ParallelToolCalls = []openai.Tool{given.Tool}, "required", false
	r.LogitBias = given.Forced.LogitBias
	message, _, err := read(c, r)
	if err != nil {
		return seen{}, err
	}
	result := openai.ChatCompletionMessage{Role: "tool", ToolCallID: message.ToolCalls[0].ID, Content: given.Result}
	r = request(append(append([]openai.ChatCompletionMessage{}, given.Cities...), message, result))
	r.Tools = []openai.Tool{given.Tool}
	answer, err := c.CreateChatCompletion(context.Background(), r)
	if err != nil {
		return seen{}, err
	}
	return seen{Arguments: message.ToolCalls[0].Function.Arguments, Text: answer.Choices[0].Message.Content}, nil
}

func streamedError(c *openai.Client) (seen, error) {
	r := request(given.First)
	r.MaxTokens, r.LogitBias = given.Endless.MaxTokens, given.Endless.LogitBias
	_, _, err := read(c, r)
	return seen{Text: "the stream ended without an error"}, err
}

func main() {
	text, err := os.ReadFile(os.Args[3])
	if err == nil {
		err = json.Unmarshal(text, &given)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	quick, slow := client(os.Args[1]), client(os.Args[2])
	found := map[string]seen{}
	for name, act := range map[string]func() (seen, error){
		"streamed":       func() (seen, error) { return streamed(quick) },
		"second_turn":    func() (seen, error) { return secondTurn(quick) },
		"tool_loop":      func() (seen, error) { return toolLoop(quick) },
		"streamed_error": func() (seen, error) { return streamedError(slow) },
	} {
		what, err := act()
		if err != nil {
			what = seen{Error: err.Error()}
		}
		found[name] = what
	}
	json.NewEncoder(os.Stdout).Encode(map[string]any{"go-openai": found})
}
